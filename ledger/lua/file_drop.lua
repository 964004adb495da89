#!lua flags=allow-oom
-- Forget a file.
-- KEYS  meta, files:<tenant>, file:<tenant>:<id>, its pieces
-- ARGV  1 store nonce, 2 id
-- reply {OK} | {NONE} | {STORE_LOST}
if redis.call('HGET', KEYS[1], 'nonce') ~= ARGV[1] then return {'STORE_LOST'} end
local was_there = redis.call('EXISTS', KEYS[3])
redis.call('HDEL', KEYS[2], ARGV[2])
for i = 3, #KEYS do redis.call('DEL', KEYS[i]) end
return {was_there == 1 and 'OK' or 'NONE'}
