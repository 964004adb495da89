#!/bin/sh
# valkey-start.sh COMMANDS USERS PROGRAM...: start the store with a user for the services, who can do
# what they do and nothing else. Passwords go by a file in memory: command lines can be read.
set -eu
commands=$1 users=$2
shift 2
umask 077
{
  # Whoever runs the store may want to look in; without a password of theirs nobody is let in so.
  printf 'user default reset off %s\n' "${ADMIN_PASSWORD:+on >$ADMIN_PASSWORD ~* &* +@all}"
  # ledger/acl.py
  # An empty one would be a password like any other: whoever gives it is let in.
  printf 'user kaiten on >%s resetkeys ~kaiten:{%s}:* ' \
    "${REDISCLI_AUTH:?is the password of the services, and must not be empty}" "$KAITEN_CELL"
  cat "$commands"
} > "$users"
exec "$@"
