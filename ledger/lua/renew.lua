#!lua flags=allow-oom
-- Say that the leader is alive and what its cell looks like. A repeat only moves renew_seq once more.
-- KEYS  meta, lease
-- ARGV  1 store nonce, 2 epoch, 3 nonce, 4 CellRecord; empty: it stays as it is
-- reply {OK, TIME of the store} | {FENCED, epoch} | {STORE_LOST}
if redis.call('HGET', KEYS[1], 'nonce') ~= ARGV[1] then return {'STORE_LOST'} end
local lease = redis.call('HMGET', KEYS[2], 'epoch', 'nonce')
if lease[1] ~= ARGV[2] or lease[2] ~= ARGV[3] then return {'FENCED', lease[1]} end
redis.call('HINCRBY', KEYS[2], 'renew_seq', 1)
if ARGV[4] ~= '' then redis.call('HSET', KEYS[2], 'cell', ARGV[4]) end
return {'OK', unpack(redis.call('TIME'))}
