"""What a store must promise before anything goes into it. Pure: facts in, ConfigError out."""

from collections.abc import Mapping
from typing import Final

from service_kit.errors import ConfigError

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


def check_store(facts: Mapping[str, str], *, allow_everysec: bool) -> None:
    """Raise ConfigError for the first rule that is not met, saying how to meet it."""
    version = facts.get("redis_version", "0.0")
    if tuple(int(part) for part in version.split(".")[:2]) < VERSION_MIN:
        raise ConfigError(
            f"ledger: the store must be Redis 7.2 or newer, or Valkey; found Redis {version}."
            " Fix: install a newer server"
        )
    for setting, allowed, consequence in RULES:
        if allow_everysec:
            allowed = EVERYSEC_ALLOWED.get(setting, allowed)
        found = facts.get(setting)
        if found is None:
            raise ConfigError(
                f"ledger: {setting} must be {' or '.join(allowed)}, but it cannot be read."
                " Fix: allow this user +config|get, or use a server that has this setting"
            )
        if found not in allowed:
            raise ConfigError(
                f"ledger: {setting} must be {' or '.join(allowed)}, or {consequence};"
                f" found {found}. Fix: CONFIG SET {setting} {allowed[0]}, and the same in the"
                " server's configuration file"
            )
