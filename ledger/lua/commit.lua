#!lua flags=allow-oom
-- Append one journal record and end the requests that end with it. All or nothing.
-- Allowed under out-of-memory: what was accepted must be able to finish and free its memory.
-- KEYS  meta, lease, inbox, journal, load; prompt_logprobs:<sequence id> per piece of a prompt;
--       finished:<sequence id> per finished choice of a request that goes on;
--       per ending: request:<id>, result:<id>, prompt_logprobs:<sequence id>, then per choice tokens:, finished:, sequence:<sequence id>
-- ARGV  1 store nonce, 2 epoch, 3 nonce, 4 seq, 5 JournalRecord, 6 result TTL in s at most, 7 of those with a note,
--       8 number of pieces of prompts, 9 of finished choices, 10 of endings; then the StoredPromptLogprobs pieces;
--       the SequenceFinished; per ending: sequence id, n, RequestResult
-- reply {OK} (also when this leader has already committed seq) | {FENCED, epoch} | {GAP, journal seq}
--       | {MISMATCH, request key} | {STORE_LOST}
if redis.call('HGET', KEYS[1], 'nonce') ~= ARGV[1] then return {'STORE_LOST'} end
local lease = redis.call('HMGET', KEYS[2], 'epoch', 'nonce', 'journal_seq', 'elected_seq')
if lease[1] ~= ARGV[2] or lease[2] ~= ARGV[3] then return {'FENCED', lease[1]} end
local seq, journal_seq = tonumber(ARGV[4]), tonumber(lease[3])
-- Above elected_seq everything is ours: a pipelined batch may be sent again as a whole.
if seq <= journal_seq and seq > tonumber(lease[4]) then return {'OK'} end
if seq ~= journal_seq + 1 then return {'GAP', lease[3]} end

-- A tenant without live requests leaves no field behind: tenants may come and go for ever.
local function release(tenant, n, prompt_tokens, note_bytes)
  if note_bytes > 0 and redis.call('HINCRBY', KEYS[5], 'notes', -note_bytes) <= 0 then redis.call('HDEL', KEYS[5], 'notes') end
  -- Accepted before tenants were counted.
  if not tenant then return end
  for field, count in pairs({['choices:' .. tenant] = n, ['prompt_tokens:' .. tenant] = prompt_tokens, ['notes:' .. tenant] = note_bytes}) do
    if redis.call('HINCRBY', KEYS[5], field, -count) <= 0 then redis.call('HDEL', KEYS[5], field) end
  end
end

-- Bytes of results by when they leave, of all and of each tenant: 40 fields, each of a part of the TTL and used again
-- behind its end; and 10 of those that stay for longer.
local now, ttl, noted_ttl = tonumber(redis.call('TIME')[1]), tonumber(ARGV[6]), tonumber(ARGV[7])
local span, noted_span = math.ceil(ttl / 32), math.ceil(noted_ttl / 8)
local fields = {}
for i = 0, 39 do fields[i + 1] = 'results:' .. i end
for i = 0, 9 do fields[i + 41] = 'noted:' .. i end
local function of_field(stored)
  local leaves, bytes = string.match(stored or '', '(%d+) (%d+)')
  if leaves and tonumber(leaves) > now then return tonumber(bytes), tonumber(leaves) end
  return 0, 0
end
-- How long to keep one more: for less, the more is taken beyond half of what submit allows. What has a note has a time of
-- its own while less than half is taken, and is kept for less of it beyond a quarter: it leaves room for all others.
local function time_to_live(key, max, has_note)
  local bytes = 0
  for _, stored in ipairs(redis.call('HMGET', key, unpack(fields))) do bytes = bytes + of_field(stored) end
  local taken = math.min(1, bytes / tonumber(max or 'inf'))
  local kept = math.max(span, math.floor(ttl * math.min(1, 2 - 2 * taken) ^ 3))
  if not has_note then return kept end
  return math.max(kept, math.floor(noted_ttl * math.max(0, math.min(1, 2 - 4 * taken)) ^ 3))
end
-- The time for which it is counted.
local function store_bytes(key, bytes, kept)
  local each, name, count = span, 'results:', 40
  if kept > ttl then each, name, count = noted_span, 'noted:', 10 end
  local leaves = (math.floor((now + kept) / each) + 1) * each
  local field = name .. string.format('%.0f', (leaves / each) % count)
  local others, last = of_field(redis.call('HGET', key, field))
  redis.call('HSET', key, field, string.format('%.0f %.0f', math.max(leaves, last), bytes + others))
  return math.max(ttl, kept) + each
end
local results_prefix = string.sub(KEYS[5], 1, -#'load' - 1) .. 'results:'

local pieces, finishes, endings = tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[10])
local first_ending_key, first_ending_arg = 6 + pieces + finishes, 11 + pieces + finishes
local known = {}
local key, arg = first_ending_key, first_ending_arg
for i = 1, endings do
  known[i] = redis.call('HMGET', KEYS[key], 'sequence_id', 'n', 'prompt_tokens', 'entries', 'finished', 'tenant', 'forgotten', 'results_max', 'note_bytes')
  if known[i][1] and (known[i][1] ~= ARGV[arg] or known[i][2] ~= ARGV[arg + 1]) then
    return {'MISMATCH', KEYS[key]}
  end
  key, arg = key + 3 + 3 * tonumber(ARGV[arg + 1]), arg + 3
end

redis.call('XADD', KEYS[4], ARGV[4] .. '-0', 'r', ARGV[5])
redis.call('HSET', KEYS[2], 'journal_seq', ARGV[4])
local told = redis.call('HMGET', KEYS[5], 'results:max', 'results:ttl', 'noted:ttl')
-- For gateways, which say how long a result that is gone was kept at most.
if endings > 0 and (told[2] ~= ARGV[6] or told[3] ~= ARGV[7]) then
  redis.call('HSET', KEYS[5], 'results:ttl', ARGV[6], 'noted:ttl', ARGV[7])
end
for i = 1, pieces do redis.call('APPEND', KEYS[5 + i], ARGV[10 + i]) end
for i = 1, finishes do redis.call('SET', KEYS[5 + pieces + i], ARGV[10 + pieces + i]) end
key, arg = first_ending_key, first_ending_arg
for i = 1, endings do
  local n = tonumber(ARGV[arg + 1])
  -- Gone or ended already: its counters are released, only the journal record counts.
  if known[i][1] and not known[i][5] then
    -- A note is forgotten with its request.
    local note = redis.call('HSTRLEN', KEYS[key], 'note')
    local kept = time_to_live(KEYS[5], told[1], note > 0)
    -- Accepted before results were counted by tenant: no bound of its own.
    local theirs = known[i][8] and results_prefix .. known[i][6]
    if theirs then kept = math.min(kept, time_to_live(theirs, known[i][8], note > 0)) end
    if not known[i][7] then redis.call('SET', KEYS[key + 1], ARGV[arg + 2], 'EX', kept) end
    -- Result and request name the id; what Redis itself needs for a key was measured.
    local bytes = #ARGV[arg + 2] + note + 2 * #KEYS[key] + 500 + 150 * n
    store_bytes(KEYS[5], bytes, kept)
    if theirs then
      local counted = store_bytes(theirs, bytes, kept)
      if redis.call('TTL', theirs) < counted then redis.call('EXPIRE', theirs, counted) end
    end
    redis.call('HSET', KEYS[key], 'finished', '1')
    redis.call('EXPIRE', KEYS[key], kept)
    redis.call('EXPIRE', KEYS[key + 2], kept)
    for entry in string.gmatch(known[i][4], '%S+') do redis.call('XDEL', KEYS[3], entry) end
    for choice = 0, n - 1 do
      local at = key + 3 + 3 * choice
      redis.call('DEL', KEYS[at], KEYS[at + 1])
      redis.call('EXPIRE', KEYS[at + 2], kept)
    end
    redis.call('HINCRBY', KEYS[5], 'choices', -n)
    redis.call('HINCRBY', KEYS[5], 'prompt_tokens', -tonumber(known[i][3]))
    release(known[i][6], n, tonumber(known[i][3]), tonumber(known[i][9] or 0))
  end
  key, arg = key + 3 + 3 * n, arg + 3
end
return {'OK'}
