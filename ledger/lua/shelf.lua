-- What a tenant keeps, files, batches and conversations: who was made when (of the first two, which are listed), who leaves
-- when, and the bytes of all together. In front of the scripts that change or list it.
-- KEYS  1 meta, 2 to 5 shelf:<tenant>: files, batches, leaving, bytes; what comes behind is the script's

-- Where one stood in its list is known for so long after it has left: somebody may be turning pages.
local PLACE_S = 300

-- Bytes that are kept, without those whose time is over: each is taken out once, so that nobody is looked at again.
local function shelf_bytes(now)
  local bytes = tonumber(redis.call('GET', KEYS[5]) or '0')
  local over = redis.call('ZRANGEBYSCORE', KEYS[4], '-inf', now)
  for _, member in ipairs(over) do
    local id, size = string.match(member, '^(.*) (%d+)$')
    redis.call('ZREM', KEYS[4], member)
    redis.call('ZREM', KEYS[2], id)
    redis.call('ZREM', KEYS[3], id)
    bytes = bytes - tonumber(size)
  end
  -- All of it may have left by its time to live.
  if redis.call('EXISTS', KEYS[4]) == 0 then bytes = 0 end
  if #over > 0 then redis.call('SET', KEYS[5], string.format('%.0f', bytes), 'KEEPTTL') end
  return bytes
end

-- `bytes`: with its own. Whatever is here lives as long as who leaves last; the sum never less than what it is of.
local function shelf_add(made, id, size, now, kept_s, bytes)
  local leaves = string.format('%.0f', now + kept_s)
  if made then redis.call('ZADD', made, string.format('%.0f', now), id) end
  redis.call('ZADD', KEYS[4], leaves, id .. ' ' .. string.format('%.0f', size))
  redis.call('SET', KEYS[5], string.format('%.0f', bytes), 'KEEPTTL')
  if made and redis.call('TTL', made) < kept_s then redis.call('EXPIRE', made, kept_s) end
  if redis.call('TTL', KEYS[4]) < kept_s then redis.call('EXPIRE', KEYS[4], kept_s) end
  if redis.call('TTL', KEYS[5]) < kept_s + 60 then redis.call('EXPIRE', KEYS[5], kept_s + 60) end
  return leaves
end

-- Before its time. It was there.
local function shelf_drop(made, id, size)
  if made then redis.call('ZREM', made, id) end
  if redis.call('ZREM', KEYS[4], id .. ' ' .. size) == 0 then return end
  local bytes = tonumber(redis.call('GET', KEYS[5]) or '0') - tonumber(size)
  redis.call('SET', KEYS[5], string.format('%.0f', bytes), 'KEEPTTL')
end
