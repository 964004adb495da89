#!lua flags=allow-oom
-- Forget a conversation.
-- KEYS  meta, shelf:<tenant> as shelf.lua has it, conversation:<tenant>:<id>, waiting
-- ARGV  1 store nonce, 2 id, 3 <tenant>:<id>, 4 whether only that it waits (0, 1)
-- reply {OK} | {NONE} | {STORE_LOST}
if redis.call('HGET', KEYS[1], 'nonce') ~= ARGV[1] then return {'STORE_LOST'} end
redis.call('HDEL', KEYS[7], ARGV[3])
local counted = redis.call('HGET', KEYS[6], 'counted')
if not counted or ARGV[4] == '1' then return {'NONE'} end
shelf_drop(nil, ARGV[2], counted)
redis.call('DEL', KEYS[6])
return {'OK'}
