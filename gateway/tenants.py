"""Who is calling: API keys, each of one tenant, and what a tenant may have live.

The file holds SHA-256 digests only. A key has 256 bits of chance, so a fast digest is enough: there
is nothing to guess. A presented key is looked up by its digest: what the time of that tells is
about a digest that nobody can choose, and a digest is no key.

The file is followed while the gateway runs: a key that is taken out is refused from the next
request on, and what was accepted with it goes on to its end. A file that is wrong, or empty,
changes nothing.
"""

import asyncio
import hashlib
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

import structlog
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from gateway.wrong_keys import WrongKeys
from ledger import TenantBounds
from service_kit.clock import Clock
from service_kit.errors import ConfigError, Forbidden, Unauthenticated

log = structlog.get_logger()

TENANT_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# Longer is no key of ours: not worth hashing.
AUTHORIZATION_CHARS_MAX: Final = 512
PRIORITY_MAX: Final = 1000
# How often the file is looked at.
LOOK_S: Final = 1.0
NO_BOUNDS: Final = TenantBounds()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Whose request it is. The name is part of ledger ids and of prefix-cache hashes."""

    name: str
    bounds: TenantBounds = NO_BOUNDS
    # Of running sequences at their longest; the scheduler keeps it. None: as its setting says.
    running_tokens_max: int | None = None
    priority_max: int = PRIORITY_MAX
    # May see what is everybody's: the live core, the archive.
    is_operator: bool = False


# Everybody, as long as there are no keys; and where only this machine can call.
DEFAULT: Final = Tenant(name="default")
LOCAL: Final = replace(DEFAULT, is_operator=True)


class WrongKey(Unauthenticated):
    """A key was presented that nobody has."""


class Keyring:
    """Every key's digest and tenant. Without keys everybody is `DEFAULT`, and an operator where
    only this machine can call (`is_local`). A tenant's bounds are its own and, in what they leave
    out, its share of those `of_cell`.
    """

    def __init__(
        self,
        keys: Sequence[tuple[bytes, Tenant]] | None = None,
        tenants: Iterable[Tenant] = (),
        *,
        of_cell: TenantBounds = NO_BOUNDS,
        is_local: bool = False,
    ) -> None:
        self._keys: dict[bytes, Tenant] | None = None
        self._tenants: dict[str, Tenant] = {}
        self._has_several = False
        self._of_cell = of_cell
        self._is_local = is_local
        self.wrong_keys = WrongKeys()
        if keys is not None:
            self.replace(keys, tenants)

    def __repr__(self) -> str:
        return f"Keyring({'open' if self._keys is None else f'{len(self._keys)} keys'})"

    @property
    def is_open(self) -> bool:
        return self._keys is None

    def replace(self, keys: Sequence[tuple[bytes, Tenant]], tenants: Iterable[Tenant]) -> None:
        """From the next request on these are the keys, and what tenants may."""
        given = {each.name: each for each in (*(tenant for _, tenant in keys), *tenants)}
        self._has_several = len(given) > 1
        self._tenants = {name: self._bounded(each) for name, each in given.items()}
        self._keys = {key: self._bounded(tenant) for key, tenant in keys}

    def share(self, count: int) -> int:
        """Of what all share one tenant has at most this: all of it as long as there is no other,
        whom it would shut out."""
        return max(1, count // 2) if self._has_several else count

    async def admit(self, authorization: str, peer: str) -> Tenant:
        """As `tenant_of`, for the doors: the refusal of a wrong key is counted, and late."""
        try:
            return self.tenant_of(authorization)
        except WrongKey:
            await self.wrong_keys.seen(peer)
            raise

    async def admit_operator(self, authorization: str, peer: str) -> None:
        """As `check_operator`."""
        await self.admit(authorization, peer)
        self.check_operator(authorization)

    def tenant_of(self, authorization: str) -> Tenant:
        """The tenant whose key an Authorization header carries. Unauthenticated says what to do,
        WrongKey if there was a key."""
        if self._keys is None:
            return LOCAL if self._is_local else DEFAULT
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthenticated("send an API key: Authorization: Bearer KEY")
        found = self._keys.get(digest(key.strip()[:AUTHORIZATION_CHARS_MAX]))
        if found is None:
            raise WrongKey("this API key is not known here")
        return found

    def named(self, name: str) -> Tenant:
        """A tenant by its name, also if all its keys are gone: for work that outlives them. It is
        one that sets nothing if its entry is gone, too.
        """
        return self._tenants.get(name) or self._bounded(Tenant(name=name))

    def _bounded(self, tenant: Tenant) -> Tenant:
        if not self._has_several:
            return tenant
        own, all_ = asdict(tenant.bounds), asdict(self._of_cell)
        bounds = {
            rule: self.share(most) if own[rule] is None and most is not None else own[rule]
            for rule, most in all_.items()
        }
        return replace(tenant, bounds=TenantBounds(**bounds))

    def check_operator(self, authorization: str) -> None:
        """Forbidden says what an operator would need."""
        tenant = self.tenant_of(authorization)
        if tenant.is_operator:
            return
        fix = "one of `kaiten keygen NAME --role operator`, or of a tenant with `operator = true`"
        raise Forbidden(f"this is for operators: it takes a key, {fix}")


def digest(key: str) -> bytes:
    """What the file holds of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


_Digest: TypeAlias = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]


class _KeyEntry(BaseModel):
    """One key, as `kaiten keygen` appends it: TOML allows any number of `[[keys]]` anywhere."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    tenant: str
    digest: _Digest
    # Of this key; the tenant's other keys have their own.
    role: Literal["tenant", "operator"] = "tenant"


class _TenantEntry(BaseModel):
    """What a tenant may; keys may stand here as well."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    keys: list[_Digest] = Field(default=[], min_length=1)
    requests_max: int | None = Field(default=None, ge=1)
    prompt_tokens_max: int | None = Field(default=None, ge=1)
    results_mb: int | None = Field(default=None, ge=1, le=1 << 30)
    running_tokens_max: int | None = Field(default=None, ge=1, lt=1 << 53)
    priority_max: int = Field(default=0, ge=-PRIORITY_MAX, le=PRIORITY_MAX)
    operator: bool = False


class _KeysFile(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    keys: list[_KeyEntry] = []
    tenants: dict[str, _TenantEntry] = {}


class KeysFile:
    """A keyring that says what its file says. ConfigError when that is wrong at the start."""

    def __init__(self, path: Path, of_cell: TenantBounds = NO_BOUNDS) -> None:
        self._path = path
        self._content = _read(path)
        self._problem = ""
        keys, tenants = _parse(path, self._content)
        if not keys:
            raise _no_key(path)
        self.keyring = Keyring(keys, tenants, of_cell=of_cell)

    async def follow(self, clock: Clock) -> None:
        """Look at the file for as long as the gateway lives."""
        while True:
            await clock.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Take over what the file says now. If that is wrong the keys stay, and the log says why,
        once.
        """
        try:
            content = await asyncio.to_thread(_read, self._path)
            found = None if content == self._content else _parse(self._path, content)
        except ConfigError as error:
            if str(error) != self._problem:
                log.error("keys.kept", reason=str(error))
            self._problem = str(error)
            return
        self._problem = ""
        if found is not None:
            self._content = content
            keys, tenants = found
            self.keyring.replace(keys, tenants)
            log.info("keys.replaced", keys=len(keys))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--api-keys-file {path} cannot be read: {error.strerror}") from error


def _parse(path: Path, text: bytes) -> tuple[list[tuple[bytes, Tenant]], list[Tenant]]:
    """ConfigError names the entry and the rule, never a digest."""
    try:
        content = tomllib.loads(text.decode("utf-8"))
    except ValueError as error:
        raise ConfigError(f"--api-keys-file {path} cannot be read: {error}") from error
    try:
        file = _KeysFile.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"--api-keys-file {path}: {where}: {first['msg']}") from None
    return _known(path, file)


def _known(path: Path, file: _KeysFile) -> tuple[list[tuple[bytes, Tenant]], list[Tenant]]:
    """Keys, and tenants: some may have no key any more, or none of them. A file without either may
    be one that is just being written.
    """
    given = [(name, text, "") for name, entry in file.tenants.items() for text in entry.keys]
    given += [(entry.tenant, entry.digest, entry.role) for entry in file.keys]
    if not (given or file.tenants):
        raise _no_key(path)
    names = [*file.tenants, *(name for name, _, _ in given)]
    tenants = {name: _tenant(path, name, file.tenants.get(name)) for name in names}
    keys: dict[bytes, Tenant] = {}
    for name, text, role in given:
        known = bytes.fromhex(text.removeprefix("sha256:"))
        if known in keys:
            raise ConfigError(f"--api-keys-file {path}: {name}: a key is given twice")
        is_operator = tenants[name].is_operator or role == "operator"
        keys[known] = replace(tenants[name], is_operator=is_operator)
    return list(keys.items()), list(tenants.values())


def _no_key(path: Path) -> ConfigError:
    return ConfigError(
        f"--api-keys-file {path} holds no key; `kaiten keygen TENANT` makes one, and while the"
        " gateway runs a file with [tenants.NAME] and no key takes all away"
    )


def _tenant(path: Path, name: str, entry: _TenantEntry | None) -> Tenant:
    """Without an entry of its own a tenant has the bounds of one that sets nothing."""
    if not TENANT_NAME.fullmatch(name):
        rule = f"a tenant's name must match {TENANT_NAME.pattern}"
        raise ConfigError(f"--api-keys-file {path}: {name!r}: {rule}")
    entry = entry or _TenantEntry()
    return Tenant(
        name=name,
        bounds=TenantBounds(
            requests_max=entry.requests_max,
            prompt_tokens_max=entry.prompt_tokens_max,
            results_bytes_max=None if entry.results_mb is None else entry.results_mb << 20,
        ),
        running_tokens_max=entry.running_tokens_max,
        priority_max=entry.priority_max,
        is_operator=entry.operator,
    )
