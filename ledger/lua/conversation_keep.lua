#!lua
-- Keep a conversation, a new one or another content of one that nobody has changed meanwhile. Idempotent by version.
-- KEYS  meta, shelf:<tenant> as shelf.lua has it, conversation:<tenant>:<id>, waiting
-- ARGV  1 store nonce, 2 id, 3 version that it has, empty: a new one, 4 version that it gets, 5 content, 6 how long to keep it in s,
--       7 bytes of the tenant at most, 8 conversations of it at most, 9 bytes that one counts for besides its content,
--       10 the response that it waits for, may be empty, 11 <tenant>:<id>
-- reply {OK, created at} | {OTHER}: it has been changed | {NONE} | {FULL, bytes kept} | {MANY, conversations kept} | {STORE_LOST}
if redis.call('HGET', KEYS[1], 'nonce') ~= ARGV[1] then return {'STORE_LOST'} end
local known = redis.call('HMGET', KEYS[6], 'version', 'created_at', 'counted')
if known[1] == ARGV[4] then return {'OK', known[2]} end
if not known[1] and ARGV[3] ~= '' then return {'NONE'} end
if known[1] and known[1] ~= ARGV[3] then return {'OTHER'} end

local now, counted = tonumber(redis.call('TIME')[1]), #ARGV[5] + tonumber(ARGV[9])
local kept, before = shelf_bytes(now), 0
-- It is counted up to a second less than it is there.
if known[3] and redis.call('ZRANK', KEYS[4], ARGV[2] .. ' ' .. known[3]) then before = tonumber(known[3]) end
-- Who makes it smaller is let in however much is kept.
if counted > before and kept - before + counted > tonumber(ARGV[7]) then return {'FULL', kept} end
-- All that leave and are neither files nor batches.
local count = redis.call('ZCARD', KEYS[4]) - redis.call('ZCARD', KEYS[2]) - redis.call('ZCARD', KEYS[3])
if not known[1] and count >= tonumber(ARGV[8]) then return {'MANY', count} end

if known[3] then shelf_drop(nil, ARGV[2], known[3]) end
shelf_add(nil, ARGV[2], counted, now, tonumber(ARGV[6]), kept - before + counted)
local created_at = known[2] or string.format('%.0f', now)
redis.call('HSET', KEYS[6], 'version', ARGV[4], 'content', ARGV[5], 'created_at', created_at, 'counted', string.format('%.0f', counted),
  'waits_for', ARGV[10])
redis.call('EXPIRE', KEYS[6], ARGV[6])
if ARGV[10] ~= '' then redis.call('HSET', KEYS[7], ARGV[11], ARGV[10]) else redis.call('HDEL', KEYS[7], ARGV[11]) end
return {'OK', created_at}
