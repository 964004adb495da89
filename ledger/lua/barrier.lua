#!lua flags=allow-oom
-- A write whatever was written before, so that WAIT behind it waits for all of that.
-- KEYS  meta
-- reply {OK}
if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('HINCRBY', KEYS[1], 'barriers', 1) end
return {'OK'}
