-- One compare-and-swap of a record. A record is one hash, so a Cluster keeps it in one slot.
--
-- KEYS[1]  the record
-- ARGV[1]  the revision that must be stored; empty: there must be no record
-- ARGV[2]  the revision to write; empty: delete the record
-- ARGV[3]  when the server may forget it, in milliseconds since the epoch; empty: never
-- ARGV[4], ARGV[5], ...  the new record: field, value, field, value
--
-- Returns the server's clock in milliseconds since the epoch, whether that revision is stored now (1 or 0),
-- and, unless this call has stored it, what is: field, value, field, value.

local key, expected, revision, forget_at = KEYS[1], ARGV[1], ARGV[2], ARGV[3]

local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

local stored = redis.call('HGETALL', key)
local is_stored = #stored > 0
local stored_revision = ''
for i = 1, #stored, 2 do
  if stored[i] == 'revision' then stored_revision = stored[i + 1] end
end

local matches
if expected == '' then matches = not is_stored else matches = stored_revision == expected end
if not matches then
  -- A driver sends again when a reply was lost. This may also be the first try, landing after a later one, whose lease
  -- ends later: so the record stays. To set what is set gives WAIT, which follows, something to wait for; after a
  -- command that deletes, it works with memory full, too.
  local is_resent = revision ~= '' and stored_revision == revision
  if is_resent then
    redis.call('HDEL', key, '') -- no such field
    redis.call('HSET', key, 'revision', revision)
  end
  return {now, is_resent and 1 or 0, stored}
end

if revision == '' then
  redis.call('DEL', key)
  return {now, 1}
end

-- A script that fails half way is not undone, and each command may lack its permission. So the order is:
-- first what changes nothing that counts, then the whole record in one command.
if is_stored then
  redis.call('HDEL', key, '') -- no such field: only whether it is permitted; what follows works with memory full, too
  redis.call('PERSIST', key) -- no expiry is left over
end

local is_new = {}
for i = 4, #ARGV, 2 do is_new[ARGV[i]] = true end
redis.call('HSET', key, unpack(ARGV, 4))
for i = 1, #stored, 2 do
  if not is_new[stored[i]] then redis.call('HDEL', key, stored[i]) end
end
if forget_at ~= '' then redis.call('PEXPIREAT', key, forget_at) end
return {now, 1}
