#!lua flags=no-writes,allow-oom
-- Some sequences as they are stored, and the records whose tokens are not stored with them yet, as one snapshot.
-- KEYS  meta, lease, journal; per sequence: sequence:, tokens:, finished:<sequence id>
-- ARGV  1 store nonce, 2 the last record wanted
-- reply {OK, records, per sequence {its request, TTL in ms, FoldedTokens, SequenceFinished}…} | {STORE_LOST}
if redis.call('HGET', KEYS[1], 'nonce') ~= ARGV[1] then return {'STORE_LOST'} end
local folded_seq = redis.call('HGET', KEYS[2], 'folded_seq') or '0'
local reply = {'OK', redis.call('XRANGE', KEYS[3], '(' .. folded_seq .. '-0', ARGV[2] .. '-0')}
for i = 4, #KEYS, 3 do
  reply[#reply + 1] = {redis.call('GET', KEYS[i]), redis.call('PTTL', KEYS[i]),
    redis.call('GET', KEYS[i + 1]), redis.call('GET', KEYS[i + 2])}
end
return reply
