#!lua
-- Accept a batch, if its tenant has not too many. Idempotent by id.
-- KEYS  meta, shelf:<tenant> as shelf.lua has it, batches, batch:<tenant>:<id>, place:<tenant>:<id>
-- ARGV  1 store nonce, 2 tenant, 3 id, 4 how long to keep it in s, 5 how long it may take in s, 6 live ones at most, 7 ones that are kept at most,
--       8 bytes of the tenant at most, 9 bytes that a batch counts for besides its fields; then names and values of its fields
-- reply {OK} | {LIVE, live ones} | {KEPT, ones kept} | {FULL, bytes kept} | {STORE_LOST}
if redis.call('HGET', KEYS[1], 'nonce') ~= ARGV[1] then return {'STORE_LOST'} end
if redis.call('EXISTS', KEYS[7]) == 1 then return {'OK'} end
local live, prefix = 0, ARGV[2] .. ':'
for _, name in ipairs(redis.call('HKEYS', KEYS[6])) do
  if string.sub(name, 1, #prefix) == prefix then live = live + 1 end
end
if live >= tonumber(ARGV[6]) then return {'LIVE', live} end

local now, counted = tonumber(redis.call('TIME')[1]), tonumber(ARGV[9])
for i = 10, #ARGV do counted = counted + #ARGV[i] end
local kept = shelf_bytes(now)
local count = redis.call('ZCARD', KEYS[3])
if count >= tonumber(ARGV[7]) then return {'KEPT', count} end
if kept + counted > tonumber(ARGV[8]) then return {'FULL', kept} end

shelf_add(KEYS[3], ARGV[3], counted, now, tonumber(ARGV[4]), kept + counted)
redis.call('HSET', KEYS[7], 'status', 'validating', 'created_at', string.format('%.0f', now),
  'expires_at', string.format('%.0f', now + tonumber(ARGV[5])), unpack(ARGV, 10))
redis.call('EXPIRE', KEYS[7], ARGV[4])
redis.call('SET', KEYS[8], string.format('%.0f', now), 'EX', tonumber(ARGV[4]) + PLACE_S)
redis.call('HSET', KEYS[6], prefix .. ARGV[3], '1')
return {'OK'}
