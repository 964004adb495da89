"""Who is calling: API keys, each of one tenant, and what a tenant may have live.

The file holds SHA-256 digests only. A key has 256 bits of chance, so a fast digest is enough: there
is nothing to guess. A presented key is compared with every digest, without leaving early, so the
time says nothing about which one matched, or how far.
"""

import hashlib
import hmac
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from ledger import TenantBounds
from service_kit.errors import ConfigError, Unauthenticated

TENANT_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# Longer is no key of ours: not worth hashing.
AUTHORIZATION_CHARS_MAX: Final = 512
PRIORITY_MAX: Final = 1000
NO_BOUNDS: Final = TenantBounds()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Whose request it is. The name is part of ledger ids and of prefix-cache hashes."""

    name: str
    bounds: TenantBounds = NO_BOUNDS
    # Of running sequences at their longest; the scheduler keeps it. None: as its setting says.
    running_tokens_max: int | None = None
    priority_max: int = PRIORITY_MAX


# Everybody, as long as there are no keys.
DEFAULT: Final = Tenant(name="default")


class Keyring:
    """Every key's digest and tenant. Without keys everybody is `DEFAULT`."""

    def __init__(self, keys: Sequence[tuple[bytes, Tenant]] | None = None) -> None:
        self._keys = None if keys is None else tuple(keys)

    def __repr__(self) -> str:
        return f"Keyring({'open' if self._keys is None else f'{len(self._keys)} keys'})"

    @property
    def is_open(self) -> bool:
        return self._keys is None

    def tenant_of(self, authorization: str) -> Tenant:
        """The tenant whose key an Authorization header carries. Unauthenticated says what to do."""
        if self._keys is None:
            return DEFAULT
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthenticated("send an API key: Authorization: Bearer KEY")
        found = self._match(digest(key.strip()[:AUTHORIZATION_CHARS_MAX]))
        if found is None:
            raise Unauthenticated("this API key is not known here")
        return found

    def _match(self, presented: bytes) -> Tenant | None:
        """All digests are compared, always."""
        assert self._keys is not None
        found = None
        for known, tenant in self._keys:
            if hmac.compare_digest(known, presented):
                found = tenant
        return found


def digest(key: str) -> bytes:
    """What the file holds of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class _TenantEntry(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    keys: list[Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]] = Field(
        min_length=1
    )
    requests_max: int | None = Field(default=None, ge=1)
    prompt_tokens_max: int | None = Field(default=None, ge=1)
    running_tokens_max: int | None = Field(default=None, ge=1, lt=1 << 53)
    priority_max: int = Field(default=0, ge=-PRIORITY_MAX, le=PRIORITY_MAX)


class _KeysFile(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    tenants: dict[str, _TenantEntry] = Field(min_length=1)


def load(path: Path) -> Keyring:
    """Read a keys file. ConfigError names the entry and the rule, never a digest."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--api-keys-file {path} cannot be read: {error}") from error
    try:
        entries = _KeysFile.model_validate(content).tenants
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"--api-keys-file {path}: {where}: {first['msg']}") from None
    return Keyring(_keys(path, entries))


def _keys(path: Path, entries: Mapping[str, _TenantEntry]) -> list[tuple[bytes, Tenant]]:
    keys: dict[bytes, Tenant] = {}
    for name, entry in entries.items():
        if not TENANT_NAME.fullmatch(name):
            rule = f"a tenant's name must match {TENANT_NAME.pattern}"
            raise ConfigError(f"--api-keys-file {path}: {name!r}: {rule}")
        tenant = Tenant(
            name=name,
            bounds=TenantBounds(
                requests_max=entry.requests_max, prompt_tokens_max=entry.prompt_tokens_max
            ),
            running_tokens_max=entry.running_tokens_max,
            priority_max=entry.priority_max,
        )
        for text in entry.keys:
            known = bytes.fromhex(text.removeprefix("sha256:"))
            if known in keys:
                raise ConfigError(f"--api-keys-file {path}: {name}: a key is given twice")
            keys[known] = tenant
    return list(keys.items())
