"""Mint an API key: the key for its user, the digest for the gateway's keys file."""

import hashlib
import re
import secrets
from typing import Final, NamedTuple

KEY_BYTES: Final = 32
TENANT_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class NewKey(NamedTuple):
    """`entry` goes into the file that `--api-keys-file` names; the key is shown once, here."""

    key: str
    entry: str


def mint(tenant: str, role: str = "tenant") -> NewKey:
    """A new key of a tenant. ValueError says what a name may be."""
    if not TENANT_NAME.fullmatch(tenant):
        raise ValueError(f"a tenant's name must match {TENANT_NAME.pattern}, got {tenant!r}")
    key = f"kt-{secrets.token_urlsafe(KEY_BYTES)}"
    digest = hashlib.sha256(key.encode()).hexdigest()
    # An array's element on lines of its own may be appended to any file, any number of times.
    entry = f'\n[[keys]]\ntenant = "{tenant}"\ndigest = "sha256:{digest}"\n'
    return NewKey(key, entry + f'role = "{role}"\n' * (role != "tenant"))
