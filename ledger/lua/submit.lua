#!lua
-- Accept a request: idempotent by id, bounded, n consecutive sequence ids, one inbox entry.
-- Not allowed under out-of-memory (commit is): a full store still drains.
-- KEYS  meta, inbox, load, lease, request:<id>, results:<tenant>
-- ARGV  1 store nonce, 2 body hash, 3 n, 4 prompt tokens, 5 choices at most, 6 prompt tokens at most,
--       7 InboxRecord, 8 RenderOptions, 9 id, 10 prefix of the sequence:<sequence id> keys,
--       11 tenant, 12 choices and 13 prompt tokens of the tenant at most, 14 bytes of stored results at most,
--       15 note, may be empty, 16 bytes of stored results of the tenant at most, 17 who waits for it, may be empty
-- reply {NEW | OLD, first sequence id, journal seq at acceptance} | {OTHER}: same id, another body
--       | {FULL_REQUESTS | FULL_TOKENS | TENANT_REQUESTS | TENANT_TOKENS, live now} | {FULL_RESULTS | TENANT_RESULTS, bytes} | {STORE_LOST}
if redis.call('HGET', KEYS[1], 'nonce') ~= ARGV[1] then return {'STORE_LOST'} end
local known = redis.call('HMGET', KEYS[5], 'hash', 'sequence_id', 'accepted_seq', 'waiting')
local waits = ARGV[17] ~= '' and ARGV[17] .. ' ' or ''
if known[1] then
  if known[1] ~= ARGV[2] then return {'OTHER'} end
  local waiting = known[4] or ''
  if not string.find(waiting, waits, 1, true) then redis.call('HSET', KEYS[5], 'waiting', waiting .. waits) end
  return {'OLD', known[2], known[3]}
end
local n, prompt_tokens = tonumber(ARGV[3]), tonumber(ARGV[4])
local tenant_choices, tenant_tokens, tenant_notes = 'choices:' .. ARGV[11], 'prompt_tokens:' .. ARGV[11], 'notes:' .. ARGV[11]
local load = redis.call('HMGET', KEYS[3], 'choices', 'prompt_tokens', tenant_choices, tenant_tokens, 'results:max', 'notes', tenant_notes)
local choices_live, tokens_live = tonumber(load[1] or 0), tonumber(load[2] or 0)
local choices_theirs, tokens_theirs = tonumber(load[3] or 0), tonumber(load[4] or 0)
-- The tenant's own bound first: whoever is over it should hear that, not that others are busy.
if choices_theirs + n > tonumber(ARGV[12]) then return {'TENANT_REQUESTS', choices_theirs} end
if tokens_theirs + prompt_tokens > tonumber(ARGV[13]) then return {'TENANT_TOKENS', tokens_theirs} end
if choices_live + n > tonumber(ARGV[5]) then return {'FULL_REQUESTS', choices_live} end
if tokens_live + prompt_tokens > tonumber(ARGV[6]) then return {'FULL_TOKENS', tokens_live} end
local now_s, fields = tonumber(redis.call('TIME')[1]), {}
for i = 0, 39 do fields[i + 1] = 'results:' .. i end
-- Of those that stay for longer.
for i = 0, 9 do fields[i + 41] = 'noted:' .. i end
local function results_of(key)
  local results = 0
  for _, stored in ipairs(redis.call('HMGET', key, unpack(fields))) do
    local leaves, bytes = string.match(stored or '', '(%d+) (%d+)')
    if leaves and tonumber(leaves) > now_s then results = results + tonumber(bytes) end
  end
  return results
end
-- Notes of what is live are there already, and stay beside the results. Where nothing is live an earlier version has left
-- them: its commits release none.
local note_bytes = #ARGV[15]
local notes_theirs = choices_theirs > 0 and tonumber(load[7] or 0) or 0
local notes = choices_live > 0 and tonumber(load[6] or 0) or 0
local results_theirs = results_of(KEYS[6]) + notes_theirs
local results = results_of(KEYS[3]) + notes
if results_theirs > tonumber(ARGV[16]) then return {'TENANT_RESULTS', results_theirs} end
if results > tonumber(ARGV[14]) then return {'FULL_RESULTS', results} end
local seq = redis.call('HGET', KEYS[4], 'journal_seq') or '0'

-- A store that lost some submits must not mint their ids again: somebody may still follow them.
local now = redis.call('TIME')
local last = tonumber(redis.call('HGET', KEYS[1], 'sequence_id') or 0)
local first = math.max(last + 1, tonumber(now[1]) * 1000000 + tonumber(now[2]))
local sequence_id = string.format('%.0f', first)
redis.call('HSET', KEYS[1], 'sequence_id', string.format('%.0f', first + n - 1))
local entry = redis.call('XADD', KEYS[2], '*', 's', sequence_id, 'r', ARGV[7])
redis.call('HSET', KEYS[5], 'hash', ARGV[2], 'sequence_id', sequence_id, 'n', n, 'prompt_tokens', prompt_tokens,
  'accepted_seq', seq, 'render', ARGV[8], 'entries', entry, 'tenant', ARGV[11],
  'results_max', ARGV[16], 'waiting', waits)
if note_bytes > 0 then redis.call('HSET', KEYS[5], 'note', ARGV[15], 'note_bytes', note_bytes) end
if note_bytes > 0 or load[6] or load[7] then
  redis.call('HSET', KEYS[3], 'notes', notes + note_bytes, tenant_notes, notes_theirs + note_bytes)
end
for choice = 0, n - 1 do
  redis.call('SET', ARGV[10] .. string.format('%.0f', first + choice), ARGV[9])
end
-- For commits, which keep results for less before it comes to a refusal.
if load[5] ~= ARGV[14] then redis.call('HSET', KEYS[3], 'results:max', ARGV[14]) end
redis.call('HINCRBY', KEYS[3], 'choices', n)
redis.call('HINCRBY', KEYS[3], 'prompt_tokens', prompt_tokens)
redis.call('HINCRBY', KEYS[3], tenant_choices, n)
redis.call('HINCRBY', KEYS[3], tenant_tokens, prompt_tokens)
return {'NEW', sequence_id, seq}
