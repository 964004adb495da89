#!lua flags=allow-oom
-- Take the lease if nobody holds it, or if it is still as the candidate saw it: of that epoch, and not renewed since,
-- unless that leader is known to have ended.
-- KEYS  meta, lease
-- ARGV  1 store nonce, 2 candidate's nonce, 3 address, 4 epoch seen ("": none), 5 renew_seq seen ("": its leader has ended)
-- reply {OK, epoch, journal seq} (also for a repeat) | {HELD, epoch} | {STORE_LOST}
if redis.call('HGET', KEYS[1], 'nonce') ~= ARGV[1] then return {'STORE_LOST'} end
local lease = redis.call('HMGET', KEYS[2], 'epoch', 'nonce', 'renew_seq', 'journal_seq')
local epoch, seq = lease[1] or '0', lease[4] or '0'
if lease[2] == ARGV[2] then return {'OK', epoch, seq} end
local is_free = not lease[2] or lease[2] == ''
local is_as_seen = lease[1] == ARGV[4] and (ARGV[5] == '' or lease[3] == ARGV[5])
if not is_free and not is_as_seen then return {'HELD', epoch} end

-- A fresh store starts above every epoch of its predecessor, or workers would refuse its leaders as stale:
-- at the time in microseconds, which no number of elections can overtake.
local now = redis.call('TIME')
redis.call('HSETNX', KEYS[2], 'epoch', now[1] .. string.format('%06d', now[2]))
epoch = redis.call('HINCRBY', KEYS[2], 'epoch', 1)
redis.call('HINCRBY', KEYS[2], 'renew_seq', 1)
redis.call('HSETNX', KEYS[2], 'folded_seq', '0')
redis.call('HSET', KEYS[2], 'nonce', ARGV[2], 'address', ARGV[3], 'journal_seq', seq, 'elected_seq', seq)
return {'OK', epoch, seq}
