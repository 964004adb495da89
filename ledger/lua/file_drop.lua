#!lua flags=allow-oom
-- Forget a file.
-- KEYS  meta, shelf:<tenant> as shelf.lua has it, file:<tenant>:<id>, its pieces
-- ARGV  1 store nonce, 2 id
-- reply {OK} | {NONE} | {STORE_LOST}
if redis.call('HGET', KEYS[1], 'nonce') ~= ARGV[1] then return {'STORE_LOST'} end
local was_there, counted = redis.call('EXISTS', KEYS[6]), redis.call('HGET', KEYS[6], 'counted')
if counted then shelf_drop(KEYS[2], ARGV[2], counted) end
for i = 6, #KEYS do redis.call('DEL', KEYS[i]) end
return {was_there == 1 and 'OK' or 'NONE'}
