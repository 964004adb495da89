#!lua flags=allow-oom
-- Ask for the end of a request or of one choice: one inbox entry per (request, choice or all), ever.
-- KEYS  meta, inbox, request:<id>
-- ARGV  1 store nonce, 2 sequence id the record was made for, 3 choice or "*", 4 InboxRecord,
--       5 how often it was asked for when whom it is no longer for asked last ("": it is for nobody)
-- reply {NEW | REPEAT} | {ENDED} | {ASKED}: somebody has asked for it since | {NONE} | {STORE_LOST}
if redis.call('HGET', KEYS[1], 'nonce') ~= ARGV[1] then return {'STORE_LOST'} end
local field = 'cancel:' .. ARGV[3]
local known = redis.call('HMGET', KEYS[3], 'sequence_id', 'finished', 'entries', field, 'cancel:*', 'attempts')
if known[1] ~= ARGV[2] then return {'NONE'} end
if known[2] then return {'ENDED'} end
if known[4] or known[5] then return {'REPEAT'} end
if ARGV[5] ~= '' and tonumber(known[6] or 0) > tonumber(ARGV[5]) then return {'ASKED'} end

local entry = redis.call('XADD', KEYS[2], '*', 's', ARGV[2], 'r', ARGV[4])
redis.call('HSET', KEYS[3], field, '1', 'entries', known[3] .. ' ' .. entry)
return {'NEW'}
