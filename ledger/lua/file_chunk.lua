#!lua
-- Put a piece of a file that is coming in. What is never kept leaves by itself. A file that is kept stays as it is: two
-- may have written it, and one is late.
-- KEYS  meta, file:<tenant>:<id>, file:<tenant>:<id>:<number>
-- ARGV  1 store nonce, 2 bytes, 3 how long to wait for the rest in s
-- reply {OK} | {STORE_LOST}
if redis.call('HGET', KEYS[1], 'nonce') ~= ARGV[1] then return {'STORE_LOST'} end
if redis.call('HGET', KEYS[2], 'bytes') then return {'OK'} end
redis.call('SET', KEYS[3], ARGV[2], 'EX', ARGV[3])
return {'OK'}
