#!lua flags=allow-oom
-- A batch goes from one state to another. Again: nothing.
-- KEYS  meta, batches, batch:<tenant>:<id>, answers:<tenant>; what is not needed in the new state
-- ARGV  1 store nonce, 2 <tenant>:<id>, 3 states it may come from, with spaces around each, 4 new state, 5 whether it is over (0, 1);
--       then names and values of fields
-- reply {OK} | {OTHER, state} | {NONE} | {STORE_LOST}
if redis.call('HGET', KEYS[1], 'nonce') ~= ARGV[1] then return {'STORE_LOST'} end
local state = redis.call('HGET', KEYS[3], 'status')
if not state then
  redis.call('HDEL', KEYS[2], ARGV[2])
  redis.call('HDEL', KEYS[4], ARGV[2])
  return {'NONE'}
end
if state == ARGV[4] then return {'OK'} end
if not string.find(ARGV[3], ' ' .. state .. ' ', 1, true) then return {'OTHER', state} end

local now = string.format('%.0f', tonumber(redis.call('TIME')[1]))
redis.call('HSET', KEYS[3], 'status', ARGV[4], ARGV[4] .. '_at', now, unpack(ARGV, 6))
if ARGV[5] == '1' then
  redis.call('HDEL', KEYS[2], ARGV[2])
  redis.call('HDEL', KEYS[4], ARGV[2])
end
for i = 5, #KEYS do redis.call('DEL', KEYS[i]) end
return {'OK'}
