#!lua flags=no-writes,allow-oom
-- Read-only commands as one snapshot. Not MULTI: Redis refuses MULTI when it is out of memory.
-- KEYS  meta; the commands' own keys are of the same slot
-- ARGV  1 store nonce, then per command: number of its words, its words
-- reply {OK, reply of each command…} | {STORE_LOST}
if redis.call('HGET', KEYS[1], 'nonce') ~= ARGV[1] then return {'STORE_LOST'} end
local replies, at = {'OK'}, 2
while at <= #ARGV do
  local words = tonumber(ARGV[at])
  replies[#replies + 1] = redis.call(unpack(ARGV, at + 1, at + words))
  at = at + 1 + words
end
return replies
