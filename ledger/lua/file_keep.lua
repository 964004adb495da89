#!lua
-- Keep a file whose pieces are all there, within what its tenant may keep. Idempotent by id. A batch has what it put out from then on,
-- and once: what was deleted since stays so.
-- KEYS  meta, shelf:<tenant> as shelf.lua has it, file:<tenant>:<id>, place:<tenant>:<id>, of an output batch:<tenant>:<id>,
--       its pieces in order
-- ARGV  1 store nonce, 2 id, 3 bytes, 4 how long to keep it in s, 5 file name, 6 purpose,
--       7 bytes of the tenant at most, 8 files of it at most, 9 bytes that a file counts for at least,
--       10 whether it is what a batch has put out (0, 1)
-- reply {OK, what it is: its bytes, pieces, created at, expires at, file name, purpose} | {FULL, bytes kept} | {MANY, files kept} | {GONE}: a piece is not there any more
--       | {OVER}: its batch is not being written down | {LEFT}: its batch has put it out before | {STORE_LOST}
if redis.call('HGET', KEYS[1], 'nonce') ~= ARGV[1] then return {'STORE_LOST'} end
local function whole()
  return redis.call('HMGET', KEYS[6], 'bytes', 'chunks', 'created_at', 'expires_at', 'filename', 'purpose')
end
local known, first = whole(), 8 + tonumber(ARGV[10])
if known[1] then
  -- A gateway of an earlier version may just have sent its pieces again; what is behind them is no part of it.
  for i = first, math.min(#KEYS, first - 1 + tonumber(known[2])) do redis.call('EXPIRE', KEYS[i], redis.call('TTL', KEYS[6])) end
  return {'OK', unpack(known)}
end
-- Who drove it may have stood still: it is over, and its output was deleted.
local state = first > 8 and redis.call('HGET', KEYS[8], 'status')
if first > 8 and state ~= 'finalizing' and state ~= 'cancelling' then return {'OVER'} end
local named = first > 8 and string.match(ARGV[2], '%a+$') .. '_file_id'
if named and redis.call('HGET', KEYS[8], named) then return {'LEFT'} end
local now, counted = tonumber(redis.call('TIME')[1]), math.max(tonumber(ARGV[3]), tonumber(ARGV[9]))
local kept = shelf_bytes(now)
if kept + counted > tonumber(ARGV[7]) then return {'FULL', kept} end
local count = redis.call('ZCARD', KEYS[2])
if count >= tonumber(ARGV[8]) then return {'MANY', count} end
for i = first, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 0 then return {'GONE'} end
end

local created_at = string.format('%.0f', now)
local expires_at = shelf_add(KEYS[2], ARGV[2], counted, now, tonumber(ARGV[4]), kept + counted)
redis.call('HSET', KEYS[6], 'bytes', ARGV[3], 'chunks', #KEYS - first + 1, 'created_at', created_at, 'expires_at', expires_at,
  'filename', ARGV[5], 'purpose', ARGV[6], 'counted', string.format('%.0f', counted))
redis.call('SET', KEYS[7], created_at, 'EX', tonumber(ARGV[4]) + PLACE_S)
redis.call('EXPIRE', KEYS[6], ARGV[4])
if named then redis.call('HSET', KEYS[8], named, ARGV[2]) end
for i = first, #KEYS do redis.call('EXPIRE', KEYS[i], ARGV[4]) end
return {'OK', unpack(whole())}
