#!lua flags=allow-oom
-- Ids of a page of what a tenant keeps, by when it was made; of the same second by id.
-- KEYS  meta, shelf:<tenant> as shelf.lua has it, of the id before, if there is one: place:<tenant>:<id>
-- ARGV  1 store nonce, 2 which: 2 files, 3 batches; 3 the oldest first (0, 1), 4 the id before the first one wanted, or none,
--       5 how many, 6 of whom: all, plain or outputs, whose ids have a second dash
-- reply {OK, id…}: one more, if there are more | {NONE}: no such id before | {STORE_LOST}
if redis.call('HGET', KEYS[1], 'nonce') ~= ARGV[1] then return {'STORE_LOST'} end
local made, is_oldest_first, most = KEYS[tonumber(ARGV[2])], ARGV[3] == '1', tonumber(ARGV[5])
shelf_bytes(tonumber(redis.call('TIME')[1]))
local at, page = 0, {'OK'}
local function is_wanted(id)
  return ARGV[6] == 'all' or (string.find(id, '-', 6, true) ~= nil) == (ARGV[6] == 'outputs')
end
local function rank_of(id)
  if is_oldest_first then return redis.call('ZRANK', made, id) end
  return redis.call('ZREVRANK', made, id)
end
local function ids(first, last)
  if is_oldest_first then return redis.call('ZRANGE', made, first, last) end
  return redis.call('ZREVRANGE', made, first, last)
end
if ARGV[4] ~= '' then
  local rank = rank_of(ARGV[4])
  -- It may have left since the page that ended with it.
  local was_made = not rank and redis.call('GET', KEYS[6])
  if was_made then
    redis.call('ZADD', made, was_made, ARGV[4])
    rank = rank_of(ARGV[4]) - 1
    redis.call('ZREM', made, ARGV[4])
  end
  if not rank or not is_wanted(ARGV[4]) then return {'NONE'} end
  at = rank + 1
end
local some, count = nil, math.min(256, most + 1)
repeat
  some = ids(at, at + count - 1)
  for _, id in ipairs(some) do
    if is_wanted(id) then page[#page + 1] = id end
    if #page == most + 2 then return page end
  end
  at, count = at + count, 256
until #some == 0
return page
