-- One step of a search: which of the next names of SCAN may be meant. Nothing is written.
--
-- ARGV[1], ARGV[2], ARGV[3]  cursor, pattern and count, as SCAN takes them
-- ARGV[4]  how many bytes of each name stand before the record's key
-- ARGV[5]  the time before which it was written, in milliseconds since the epoch; empty: whenever
-- ARGV[6]  its task id or label, or the beginning of its key or of what stands behind a colon there; empty: any
-- ARGV[7]  the beginning of its label; empty: any
-- ARGV[8], ARGV[9], ...  what it holds: field, value, field, value; first what fewest hold
--
-- Returns the next cursor, and name, time, name, time. What the server cannot tell of is there, without a time.
-- A field costs more than SCAN does, so each is read alone, and only of what may still be meant.

local asked, latest, name, beginning = ARGV, tonumber(ARGV[5]), ARGV[6], ARGV[7]
local last = string.match(name, '^.*:(.*)$') or name
local first, behind_colon = ARGV[4] + 1, ':' .. last

local known = {COMPLETED = true, FAILED = true, IN_PROGRESS = true, RELEASED = true, UNKNOWN = true}

local ask, type, find = redis.pcall, type, string.find

-- The field's value, empty where there is none; nil if this is no record of this server.
local function get(record, field)
  local value = ask('HGET', record, field)
  if type(value) ~= 'table' then return value or '' end
  if not (find(value.err, 'WRONGTYPE') or find(value.err, 'non local key')) then redis.call('HGET', record, field) end
end

local function is_named(record)
  local at = find(record, last, first, true)
  local by_key = at and (at == first or find(record, behind_colon, at - 1, true))
  if by_key and beginning == '' then return true end
  local label = get(record, 'label')
  if not label or find(label, 'encrypted:', 1, true) == 1 then return true end
  return find(label, beginning, 1, true) == 1 and (by_key or label == name or get(record, 'task_id') == name)
end

-- When it was written, if that is asked, and empty if it is not or cannot be told; false: it is not meant.
local function written(record)
  for i = 8, #asked, 2 do
    local value = get(record, asked[i])
    if value ~= asked[i + 1] then
      local is_clear = value and (asked[i] ~= 'status' or known[value])
      if is_clear then return false end
      return ''
    end
  end
  local time = latest and get(record, 'updated_at') or ''
  if latest and not (#time < 20 and find(time, '^%d+$')) then return '' end
  return not (latest and tonumber(time) >= latest) and is_named(record) and time
end

local page, found = redis.call('SCAN', ARGV[1], 'MATCH', ARGV[2], 'COUNT', ARGV[3]), {}
for _, each in ipairs(page[2]) do
  local time = written(each)
  if time then
    found[#found + 1] = each
    found[#found + 1] = time
  end
end
return {page[1], found}
