#!lua flags=allow-oom
-- Move old journal tokens into one string per live sequence, and trim the journal, at most to match.
-- KEYS  meta, lease, journal; per piece: tokens:<sequence id>, sequence:<sequence id>
-- ARGV  1 store nonce, 2 epoch, 3 nonce, 4 fold from seq, 5 through seq, 6 trim through seq, 7… FoldedTokens per piece
-- reply {OK} (also for a repeat) | {FENCED, epoch} | {STALE, folded seq} | {GAP, journal seq} | {STORE_LOST}
if redis.call('HGET', KEYS[1], 'nonce') ~= ARGV[1] then return {'STORE_LOST'} end
local lease = redis.call('HMGET', KEYS[2], 'epoch', 'nonce', 'folded_seq', 'journal_seq')
if lease[1] ~= ARGV[2] or lease[2] ~= ARGV[3] then return {'FENCED', lease[1]} end
if lease[3] == ARGV[5] then return {'OK'} end
if lease[3] ~= ARGV[4] then return {'STALE', lease[3]} end
if tonumber(ARGV[5]) > tonumber(lease[4]) then return {'GAP', lease[4]} end

for i = 1, #ARGV - 6 do
  local key = 2 + 2 * i
  -- No TTL on sequence:<sequence id> means live. A sequence that has ended meanwhile must not get a key again.
  if redis.call('TTL', KEYS[key + 1]) == -1 then redis.call('APPEND', KEYS[key], ARGV[6 + i]) end
end
redis.call('HSET', KEYS[2], 'folded_seq', ARGV[5])
redis.call('XTRIM', KEYS[3], 'MINID', '=', string.format('%.0f-0', math.min(tonumber(ARGV[5]), tonumber(ARGV[6])) + 1))
return {'OK'}
