#!lua flags=allow-oom
-- Forget a file, but for a while where it stood in the list: somebody may turn pages and delete what was on them.
-- KEYS  meta, shelf:<tenant> as shelf.lua has it, file:<tenant>:<id>, its pieces
-- ARGV  1 store nonce, 2 id, 3 how long its place is remembered in s
-- reply {OK} | {NONE} | {STORE_LOST}
if redis.call('HGET', KEYS[1], 'nonce') ~= ARGV[1] then return {'STORE_LOST'} end
local created_at, counted = unpack(redis.call('HMGET', KEYS[6], 'created_at', 'counted'))
if counted then shelf_drop(KEYS[2], ARGV[2], counted) end
for i = 7, #KEYS do redis.call('DEL', KEYS[i]) end
if not created_at then return {'NONE'} end
redis.call('DEL', KEYS[6])
redis.call('HSET', KEYS[6], 'was_made', created_at)
redis.call('EXPIRE', KEYS[6], ARGV[3])
return {'OK'}
