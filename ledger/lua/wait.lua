#!lua flags=allow-oom
-- Somebody comes back to a request: it does not end before they have left it, too.
-- KEYS  meta, request:<id>
-- ARGV  1 store nonce, 2 who
-- reply {OK} | {STORE_LOST}
if redis.call('HGET', KEYS[1], 'nonce') ~= ARGV[1] then return {'STORE_LOST'} end
if redis.call('EXISTS', KEYS[2]) == 0 then return {'OK'} end
local waiting = redis.call('HGET', KEYS[2], 'waiting') or ''
if not string.find(waiting, ARGV[2], 1, true) then redis.call('HSET', KEYS[2], 'waiting', waiting .. ARGV[2] .. ' ') end
return {'OK'}
