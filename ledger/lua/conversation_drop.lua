#!lua flags=allow-oom
-- Forget a conversation.
-- KEYS  meta, shelf:<tenant> as shelf.lua has it, conversation:<tenant>:<id>
-- ARGV  1 store nonce, 2 id
-- reply {OK} | {NONE} | {STORE_LOST}
if redis.call('HGET', KEYS[1], 'nonce') ~= ARGV[1] then return {'STORE_LOST'} end
local counted = redis.call('HGET', KEYS[6], 'counted')
if not counted then return {'NONE'} end
shelf_drop(nil, ARGV[2], counted)
redis.call('DEL', KEYS[6])
return {'OK'}
