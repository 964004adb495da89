#!lua
-- Keep a file whose pieces are all there, within what its tenant may keep. Idempotent by id.
-- KEYS  meta, files:<tenant>, file:<tenant>:<id>, its pieces in order
-- ARGV  1 store nonce, 2 id, 3 bytes, 4 how long to keep it in s, 5 bytes of the tenant at most, 6 file name, 7 purpose
-- reply {OK, created at, expires at} | {FULL, bytes kept} | {GONE}: a piece is not there any more | {STORE_LOST}
if redis.call('HGET', KEYS[1], 'nonce') ~= ARGV[1] then return {'STORE_LOST'} end
local known = redis.call('HMGET', KEYS[3], 'created_at', 'expires_at')
if known[1] then
  -- Its pieces may just have been sent again.
  for i = 4, #KEYS do redis.call('EXPIRE', KEYS[i], redis.call('TTL', KEYS[3])) end
  return {'OK', known[1], known[2]}
end
local now, kept, over = tonumber(redis.call('TIME')[1]), 0, {}
local files = redis.call('HGETALL', KEYS[2])
for i = 1, #files, 2 do
  local leaves, bytes = string.match(files[i + 1], '(%d+) (%d+)')
  if tonumber(leaves) > now then kept = kept + tonumber(bytes) else over[#over + 1] = files[i] end
end
if kept + tonumber(ARGV[3]) > tonumber(ARGV[5]) then return {'FULL', kept} end
for i = 4, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 0 then return {'GONE'} end
end

local expires_at = string.format('%.0f', now + tonumber(ARGV[4]))
for _, id in ipairs(over) do redis.call('HDEL', KEYS[2], id) end
redis.call('HSET', KEYS[3], 'bytes', ARGV[3], 'chunks', #KEYS - 3, 'created_at', string.format('%.0f', now),
  'expires_at', expires_at, 'filename', ARGV[6], 'purpose', ARGV[7])
redis.call('HSET', KEYS[2], ARGV[2], expires_at .. ' ' .. ARGV[3])
for i = 2, #KEYS do redis.call('EXPIRE', KEYS[i], ARGV[4]) end
return {'OK', string.format('%.0f', now), expires_at}
