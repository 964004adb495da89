#!lua flags=no-writes,allow-oom
-- Which commands the ledger's user may not use, on this key.
-- KEYS  meta
-- ARGV  commands; a subcommand behind a bar
-- reply {OK, what is refused…}
local refused = {'OK'}
for _, name in ipairs(ARGV) do
  local command, subcommand = string.match(name, '^([^|]*)|?(.*)$')
  local is_known, may = pcall(redis.acl_check_cmd, command, subcommand ~= '' and subcommand or KEYS[1], KEYS[1], KEYS[1])
  if is_known and not may then refused[#refused + 1] = name end
end
return refused
