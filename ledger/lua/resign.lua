#!lua flags=allow-oom
-- Give the lease up, so that a standby may take it at once. The epoch stays: it only ever grows.
-- KEYS  meta, lease
-- ARGV  1 store nonce, 2 epoch, 3 nonce
-- reply {OK} (also for a repeat, and when somebody else already leads) | {STORE_LOST}
if redis.call('HGET', KEYS[1], 'nonce') ~= ARGV[1] then return {'STORE_LOST'} end
local lease = redis.call('HMGET', KEYS[2], 'epoch', 'nonce')
if lease[1] == ARGV[2] and lease[2] == ARGV[3] then
  redis.call('HSET', KEYS[2], 'nonce', '', 'address', '')
end
return {'OK'}
