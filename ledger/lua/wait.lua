#!lua flags=allow-oom
-- Somebody comes back to a request: whoever left before ends it no more.
-- KEYS  meta, request:<id>
-- ARGV  1 store nonce
-- reply {OK, how often it was asked for; 0: it is not there} | {STORE_LOST}
if redis.call('HGET', KEYS[1], 'nonce') ~= ARGV[1] then return {'STORE_LOST'} end
if redis.call('EXISTS', KEYS[2]) == 0 then return {'OK', 0} end
return {'OK', redis.call('HINCRBY', KEYS[2], 'attempts', 1)}
