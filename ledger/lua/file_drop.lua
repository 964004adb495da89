#!lua flags=allow-oom
-- Forget a file, but for a while where it stood in the list: somebody may turn pages and delete what was on them.
-- KEYS  meta, shelf:<tenant> as shelf.lua has it, file:<tenant>:<id>, place:<tenant>:<id>, its pieces
-- ARGV  1 store nonce, 2 id
-- reply {OK} | {NONE} | {STORE_LOST}
if redis.call('HGET', KEYS[1], 'nonce') ~= ARGV[1] then return {'STORE_LOST'} end
local created_at, counted = unpack(redis.call('HMGET', KEYS[6], 'created_at', 'counted'))
if counted then shelf_drop(KEYS[2], ARGV[2], counted) end
for i = 8, #KEYS do redis.call('DEL', KEYS[i]) end
if not created_at then return {'NONE'} end
redis.call('DEL', KEYS[6])
redis.call('SET', KEYS[7], created_at, 'EX', PLACE_S)
return {'OK'}
