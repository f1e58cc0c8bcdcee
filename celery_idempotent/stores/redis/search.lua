-- One step of a search: which of the next names of SCAN may be meant. Nothing is written.
--
-- ARGV[1], ARGV[2], ARGV[3]  cursor, pattern and count, as SCAN takes them
-- ARGV[4]  how many bytes of each name stand before the record's key
-- ARGV[5]  the time before which it was written, in milliseconds since the epoch; empty: whenever
-- ARGV[6]  its task id or label, or the beginning of its key or of what stands behind a colon there; empty: any
-- ARGV[7]  the beginning of its label; empty: any
-- ARGV[8], ARGV[9], ...  what it holds: field, value, field, value
--
-- Returns the next cursor, and name, time, name, time. What the server cannot tell of is there, without a time.

local latest, name, beginning = tonumber(ARGV[5]), ARGV[6], ARGV[7]
local last = string.match(name, '^.*:(.*)$') or name

local fields, values = {'status'}, {}
for i = 8, #ARGV, 2 do
  fields[#fields + 1] = ARGV[i]
  values[#fields] = ARGV[i + 1]
end
local exact = #fields
if ARGV[5] ~= '' then fields[#fields + 1] = 'updated_at' end
local time = #fields
if name .. beginning ~= '' then
  fields[time + 1], fields[time + 2] = 'label', 'task_id'
end

local known = {COMPLETED = true, FAILED = true, IN_PROGRESS = true, RELEASED = true, UNKNOWN = true}

local function digits(text) return text and #text < 20 and string.match(text, '^%d+$') end

local function begins(text, by) return string.sub(text, 1, #by) == by end

local function is_named(key, label, task_id)
  return task_id == name or label == name or begins(key, name) or begins(key, last)
    or string.find(key, ':' .. last, 1, true) ~= nil
end

local function is_meant(key, held)
  for i = 2, exact do
    if (held[i] or '') ~= values[i] then return false end
  end
  if time > exact and tonumber(held[time]) >= latest then return false end
  if name .. beginning == '' then return true end
  local label = held[time + 1] or ''
  return begins(label, 'encrypted:') or (begins(label, beginning) and (name == '' or is_named(key, label, held[time + 2])))
end

local page, found = redis.call('SCAN', ARGV[1], 'MATCH', ARGV[2], 'COUNT', ARGV[3]), {}
for _, each in ipairs(page[2]) do
  local held = #fields > 1 and redis.pcall('HMGET', each, unpack(fields)) or {}
  local is_none = held.err and (string.find(held.err, 'WRONGTYPE') or string.find(held.err, 'non local key'))
  if held.err and not is_none then return held end
  local is_unclear = is_none or not known[held[1]] or (time > exact and not digits(held[time]))
  if is_unclear or is_meant(string.sub(each, ARGV[4] + 1), held) then
    found[#found + 1] = each
    found[#found + 1] = not is_unclear and time > exact and held[time] or ''
  end
end
return {page[1], found}
