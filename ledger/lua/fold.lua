#!lua flags=allow-oom
-- Move old journal tokens into one string per live sequence, and trim the journal, at most to match.
-- KEYS  meta, lease, journal; per piece: tokens:<sequence id>, sequence:<sequence id>
-- ARGV  1 store nonce, 2 epoch, 3 nonce, 4 fold from seq, 5 through seq, 6 trim through seq, 7 part of the fold, from 0,
--       8 of how many, in order; 9… FoldedTokens per piece of this part
-- reply {OK} (also for a repeat) | {FENCED, epoch} | {STALE, folded seq} | {GAP, journal seq} | {STORE_LOST}
if redis.call('HGET', KEYS[1], 'nonce') ~= ARGV[1] then return {'STORE_LOST'} end
local lease = redis.call('HMGET', KEYS[2], 'epoch', 'nonce', 'folded_seq', 'journal_seq', 'fold_part')
if lease[1] ~= ARGV[2] or lease[2] ~= ARGV[3] then return {'FENCED', lease[1]} end
if lease[3] == ARGV[5] then return {'OK'} end
if lease[3] ~= ARGV[4] then return {'STALE', lease[3]} end
if tonumber(ARGV[5]) > tonumber(lease[4]) then return {'GAP', lease[4]} end
-- What a leader before us had begun counts as folded already: positions tell, and it told us.
local fold = ARGV[2] .. ' ' .. ARGV[5] .. ' '
local parts = lease[5] and string.sub(lease[5], 1, #fold) == fold and tonumber(string.sub(lease[5], #fold + 1)) or 0
if tonumber(ARGV[7]) < parts then return {'OK'} end
if tonumber(ARGV[7]) > parts then return {'STALE', lease[3]} end

for i = 1, #ARGV - 8 do
  local key = 2 + 2 * i
  -- No TTL on sequence:<sequence id> means live. A sequence that has ended meanwhile must not get a key again.
  if redis.call('TTL', KEYS[key + 1]) == -1 then redis.call('APPEND', KEYS[key], ARGV[8 + i]) end
end
if parts + 1 < tonumber(ARGV[8]) then
  redis.call('HSET', KEYS[2], 'fold_part', fold .. parts + 1)
  return {'OK'}
end
redis.call('HDEL', KEYS[2], 'fold_part')
redis.call('HSET', KEYS[2], 'folded_seq', ARGV[5])
redis.call('XTRIM', KEYS[3], 'MINID', '=', string.format('%.0f-0', math.min(tonumber(ARGV[5]), tonumber(ARGV[6])) + 1))
return {'OK'}
