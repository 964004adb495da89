#!lua flags=allow-oom
-- The answer of a line, once: whoever comes later changes nothing.
-- KEYS  meta, batch:<tenant>:<id>, batch:<tenant>:<id>:lines, answers:<tenant>
-- ARGV  1 store nonce, 2 number of the line, 3 answer, 4 completed or failed, 5 <tenant>:<id>,
--       6 bytes of answers of the tenant's live batches at most: beyond, only failures are taken
-- reply {OK} | {FULL, bytes} | {NONE}: it is not computed any more, and what was answered is being written down | {STORE_LOST}
if redis.call('HGET', KEYS[1], 'nonce') ~= ARGV[1] then return {'STORE_LOST'} end
local state = redis.call('HGET', KEYS[2], 'status')
if state ~= 'in_progress' then return {'NONE'} end
local bytes, kept = #ARGV[3] + #ARGV[2] + 64, 0
if ARGV[4] == 'completed' and redis.call('HSTRLEN', KEYS[3], ARGV[2]) == 0 then
  local live = redis.call('HGETALL', KEYS[4])
  for i = 2, #live, 2 do kept = kept + tonumber(live[i]) end
  if kept + bytes > tonumber(ARGV[6]) then return {'FULL', kept} end
end
if redis.call('HSETNX', KEYS[3], ARGV[2], ARGV[3]) == 1 then
  redis.call('HINCRBY', KEYS[4], ARGV[5], bytes)
  redis.call('HINCRBY', KEYS[2], ARGV[4], 1)
  -- Answers leave no sooner than their batch: the next one may be long in coming.
  local kept_s = redis.call('TTL', KEYS[2]) + 1
  redis.call('EXPIRE', KEYS[3], kept_s)
  if redis.call('TTL', KEYS[4]) < kept_s then redis.call('EXPIRE', KEYS[4], kept_s) end
end
return {'OK'}
