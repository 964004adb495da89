#!lua flags=allow-oom
-- Take the lease if nobody holds it, or if it is still as the candidate saw it: of that epoch, and not renewed since,
-- unless that leader is known to have ended.
-- KEYS  meta, lease
-- ARGV  1 store nonce, 2 candidate's nonce, 3 address, 4 epoch seen ("": none), 5 renew_seq seen ("": its leader has ended),
--       6 an epoch that some worker has seen (0: none is known)
-- reply {OK, epoch, journal seq, seq of the last record} (also for a repeat) | {HELD, epoch} | {STORE_LOST}
if redis.call('HGET', KEYS[1], 'nonce') ~= ARGV[1] then return {'STORE_LOST'} end
local lease = redis.call('HMGET', KEYS[2], 'epoch', 'nonce', 'renew_seq', 'journal_seq', 'after_seq', 'elected_seq')
local epoch, seq = lease[1] or '0', lease[4] or '0'
if lease[2] == ARGV[2] then return {'OK', epoch, seq, lease[5]} end
local is_free = not lease[2] or lease[2] == ''
local is_as_seen = lease[1] == ARGV[4] and (ARGV[5] == '' or lease[3] == ARGV[5])
if not is_free and not is_as_seen then return {'HELD', epoch} end

-- This store may be new, or older than what has been: a backup, a replica that lagged, a crash that lost a second. So
-- nothing begins below the time in microseconds, which no number of elections or commits overtakes: workers do not
-- take the leader for a stale one, and followers see that something is between what they have and what comes.
local now = redis.call('TIME')
local now_us = tonumber(now[1]) * 1000000 + tonumber(now[2])
local next_epoch = string.format('%.0f', math.max(tonumber(epoch) + 1, now_us, tonumber(ARGV[6]) + 1))
local next_seq = string.format('%.0f', math.max(tonumber(seq), now_us))
-- A leader that committed nothing left no record behind.
local after_seq = lease[4] and lease[4] == lease[6] and lease[5] or seq
redis.call('HINCRBY', KEYS[2], 'renew_seq', 1)
redis.call('HSETNX', KEYS[2], 'folded_seq', '0')
redis.call('HSET', KEYS[2], 'epoch', next_epoch, 'nonce', ARGV[2], 'address', ARGV[3],
  'after_seq', after_seq, 'journal_seq', next_seq, 'elected_seq', next_seq)
return {'OK', next_epoch, next_seq, after_seq}
