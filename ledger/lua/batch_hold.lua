#!lua flags=allow-oom
-- Who drives a batch: a hint against double work. What a driver writes is written once, whoever does it.
-- KEYS  meta, batch:<tenant>:<id>:driver
-- ARGV  1 store nonce, 2 who, 3 for how long in ms
-- reply {OK} | {HELD} | {STORE_LOST}
if redis.call('HGET', KEYS[1], 'nonce') ~= ARGV[1] then return {'STORE_LOST'} end
local holder = redis.call('GET', KEYS[2])
if holder and holder ~= ARGV[2] then return {'HELD'} end
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
return {'OK'}
