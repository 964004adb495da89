"""What a store must promise before anything goes into it. Pure: facts in, ConfigError out."""

from collections.abc import Mapping
from typing import Final

from service_kit.errors import ConfigError, Unavailable

VERSION_MIN: Final = (7, 2)

# (setting, what it must be, what goes wrong otherwise)
RULES: Final[tuple[tuple[str, tuple[str, ...], str], ...]] = (
    ("appendonly", ("yes",), "a restart of the store loses accepted requests"),
    ("appendfsync", ("always",), "a crash of the store loses what it has acknowledged"),
    (
        "no-appendfsync-on-rewrite",
        ("no",),
        "a crash during a rewrite loses what was acknowledged",
    ),
    ("maxmemory-policy", ("noeviction",), "accepted requests may be evicted"),
)
SETTINGS: Final = tuple(setting for setting, _, _ in RULES)
EVERYSEC_ALLOWED: Final[Mapping[str, tuple[str, ...]]] = {"appendfsync": ("always", "everysec")}


KINDS: Final = {"single": "single server", "cluster": "cluster", "sentinel": "Sentinels' primary"}
# What a server says of itself, and the url that suits it.
MODES: Final = {
    "standalone": "redis:// for it alone, redis+sentinel://HOST,HOST/NAME for those of Sentinels",
    "cluster": "redis+cluster://HOST,HOST",
    "sentinel": "redis+sentinel://HOST,HOST/NAME, or the url of the store itself",
}


def check_kind(facts: Mapping[str, str], kind: str) -> None:
    """Raise ConfigError if the url is not one for such a server."""
    mode = facts.get("redis_mode") or facts.get("server_mode") or "standalone"
    if mode != ("cluster" if kind == "cluster" else "standalone"):
        raise ConfigError(
            f"ledger url: it is one of a {KINDS[kind]}, but the server is a {mode}."
            f" Fix: {MODES.get(mode, 'another server')}"
        )
    if kind == "single" and facts.get("role") == "slave":
        raise ConfigError(
            "ledger url: it must lead to the primary; this server is a replica of"
            f" {facts.get('master_host')}:{facts.get('master_port')}. Fix: the primary's address,"
            " or redis+sentinel://HOST,HOST/NAME"
        )


def check_replicas(facts: Mapping[str, str], replicas_min: int) -> int:
    """How many there are. Unavailable: too few for a promise; they may come back."""
    count = int(facts.get("connected_slaves") or 0)
    if count < replicas_min:
        raise Unavailable(
            f"the store's primary must have {replicas_min} replicas (store-replicas-min);"
            f" {count} are connected"
        )
    return count


def is_full(facts: Mapping[str, str]) -> bool:
    """Whether it refuses whatever is new, as it counts: what it owes to replicas and to its file is
    not in it. What is accepted goes on.
    """
    bound = int(facts.get("maxmemory") or 0)
    uncounted = int(facts.get("mem_not_counted_for_evict") or 0)
    return 0 < bound < int(facts.get("used_memory") or 0) - uncounted


def check_store(facts: Mapping[str, str], *, allow_everysec: bool, where: str = "") -> None:
    """Raise ConfigError for the first rule that is not met, saying how to meet it. `where`: of
    which server, if it is not the one that answers.
    """
    subject = f"ledger: {where}: " if where else "ledger: "
    version = facts.get("redis_version", "0.0")
    if tuple(int(part) for part in version.split(".")[:2]) < VERSION_MIN:
        raise ConfigError(
            f"{subject}the store must be Redis 7.2 or newer, or Valkey; found Redis {version}."
            " Fix: install a newer server"
        )
    for setting, allowed, consequence in RULES:
        if allow_everysec:
            allowed = EVERYSEC_ALLOWED.get(setting, allowed)
        found = facts.get(setting)
        if found is None:
            raise ConfigError(
                f"{subject}{setting} must be {' or '.join(allowed)}, but it cannot be read."
                " Fix: allow this user +config|get, or use a server that has this setting"
            )
        if found not in allowed:
            raise ConfigError(
                f"{subject}{setting} must be {' or '.join(allowed)}, or {consequence};"
                f" found {found}. Fix: CONFIG SET {setting} {allowed[0]}, and the same in the"
                " server's configuration file"
            )
