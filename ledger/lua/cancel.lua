#!lua flags=allow-oom
-- Ask for the end of a request or of one choice: one inbox entry per (request, choice or all), ever.
-- KEYS  meta, inbox, request:<id>
-- ARGV  1 store nonce, 2 sequence id the record was made for, 3 choice or "*", 4 InboxRecord,
--       5 who waits for it no more: it ends with the last of them (empty: whoever waits), 6 unless it goes on (0, 1)
--       Of a gateway that was killed they stay: then it is computed to its end.
-- reply {NEW | REPEAT} | {ENDED} | {WAITED}: for somebody else, or it goes on | {NONE} | {STORE_LOST}
if redis.call('HGET', KEYS[1], 'nonce') ~= ARGV[1] then return {'STORE_LOST'} end
local field = 'cancel:' .. ARGV[3]
local known = redis.call('HMGET', KEYS[3], 'sequence_id', 'finished', 'entries', field, 'cancel:*', 'waiting')
if known[1] ~= ARGV[2] then return {'NONE'} end
if known[2] then return {'ENDED'} end
if known[4] or known[5] then return {'REPEAT'} end
if ARGV[5] ~= '' then
  local left, count = string.gsub(known[6] or '', ARGV[5] .. ' ', '')
  -- Who is not there has left before, and was told what came of it.
  if count == 0 then return {'WAITED'} end
  redis.call('HSET', KEYS[3], 'waiting', left)
  if left ~= '' or ARGV[6] == '1' then return {'WAITED'} end
end

local entry = redis.call('XADD', KEYS[2], '*', 's', ARGV[2], 'r', ARGV[4])
redis.call('HSET', KEYS[3], field, '1', 'entries', known[3] .. ' ' .. entry)
return {'NEW'}
