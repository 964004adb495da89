#!lua flags=allow-oom
-- The answer of a line, once: whoever comes later changes nothing.
-- KEYS  meta, batch:<tenant>:<id>, batch:<tenant>:<id>:lines
-- ARGV  1 store nonce, 2 number of the line, 3 answer, 4 completed or failed, 5 how long to keep it in s
-- reply {OK} | {NONE}: the batch is over | {STORE_LOST}
if redis.call('HGET', KEYS[1], 'nonce') ~= ARGV[1] then return {'STORE_LOST'} end
local state = redis.call('HGET', KEYS[2], 'status')
if state ~= 'in_progress' and state ~= 'cancelling' then return {'NONE'} end
if redis.call('HSETNX', KEYS[3], ARGV[2], ARGV[3]) == 1 then
  redis.call('HINCRBY', KEYS[2], ARGV[4], 1)
  redis.call('EXPIRE', KEYS[3], ARGV[5])
end
return {'OK'}
