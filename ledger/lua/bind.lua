#!lua flags=allow-oom
-- Adopt this cell's store, or create it when the cell has never been used.
-- KEYS  meta, lease, inbox, journal, load
-- ARGV  1 schema version, 2 nonce to use if the store is created now
-- reply {OK, nonce} | {SCHEMA, found version} | {PARTIAL}: meta is gone while other keys are there
local schema = redis.call('HGET', KEYS[1], 'schema')
if schema then
  if schema ~= ARGV[1] then return {'SCHEMA', schema} end
  return {'OK', redis.call('HGET', KEYS[1], 'nonce')}
end
if redis.call('EXISTS', KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]) > 0 then return {'PARTIAL'} end
redis.call('HSET', KEYS[1], 'schema', ARGV[1], 'nonce', ARGV[2])
return {'OK', ARGV[2]}
