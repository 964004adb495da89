#!lua flags=allow-oom
-- Nobody finds a request any more. What is live goes on to its end, which is then not found either.
-- KEYS  meta, request:<id>, result:<id>, load
-- ARGV  1 store nonce
-- reply {OK} | {NONE} | {STORE_LOST}
if redis.call('HGET', KEYS[1], 'nonce') ~= ARGV[1] then return {'STORE_LOST'} end
local known = redis.call('HMGET', KEYS[2], 'sequence_id', 'forgotten', 'finished', 'note_bytes', 'tenant')
if not known[1] or known[2] then return {'NONE'} end
-- The id stays taken for as long as the rest of it is kept.
redis.call('HSET', KEYS[2], 'forgotten', '1')
redis.call('HDEL', KEYS[2], 'note', 'note_bytes')
-- What has ended is counted among the results, and until these leave.
if known[4] and not known[3] then
  for _, field in ipairs({'notes', 'notes:' .. known[5]}) do
    if redis.call('HINCRBY', KEYS[4], field, -known[4]) <= 0 then redis.call('HDEL', KEYS[4], field) end
  end
end
redis.call('DEL', KEYS[3])
return {'OK'}
