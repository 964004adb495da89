#!lua
-- Accept a batch, if its tenant has not too many. Idempotent by id.
-- KEYS  meta, batches, batches:<tenant>, batch:<tenant>:<id>
-- ARGV  1 store nonce, 2 tenant, 3 id, 4 how long to keep it in s, 5 how long it may take in s, 6 live ones at most, 7 ones that are kept at most;
--       then names and values of its fields
-- reply {OK} | {FULL, live ones} | {KEPT, ones kept} | {STORE_LOST}
if redis.call('HGET', KEYS[1], 'nonce') ~= ARGV[1] then return {'STORE_LOST'} end
if redis.call('EXISTS', KEYS[4]) == 1 then return {'OK'} end
local live, prefix = 0, ARGV[2] .. ':'
for _, name in ipairs(redis.call('HKEYS', KEYS[2])) do
  if string.sub(name, 1, #prefix) == prefix then live = live + 1 end
end
if live >= tonumber(ARGV[6]) then return {'FULL', live} end

local now = tonumber(redis.call('TIME')[1])
local names = redis.call('HGETALL', KEYS[3])
if #names / 2 >= tonumber(ARGV[7]) then
  local kept = #names / 2
  for i = 1, #names, 2 do
    if tonumber(names[i + 1]) <= now then
      redis.call('HDEL', KEYS[3], names[i])
      kept = kept - 1
    end
  end
  if kept >= tonumber(ARGV[7]) then return {'KEPT', kept} end
end

redis.call('HSET', KEYS[4], 'status', 'validating', 'created_at', string.format('%.0f', now),
  'expires_at', string.format('%.0f', now + tonumber(ARGV[5])), unpack(ARGV, 8))
redis.call('EXPIRE', KEYS[4], ARGV[4])
redis.call('HSET', KEYS[2], prefix .. ARGV[3], '1')
redis.call('HSET', KEYS[3], ARGV[3], string.format('%.0f', now + tonumber(ARGV[4])))
redis.call('EXPIRE', KEYS[3], ARGV[4])
return {'OK'}
