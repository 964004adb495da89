"""Authorities of a test's own, and certificates of theirs in files."""

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import trustme

from kaiten.client import TLS
from service_kit.tls import TlsFiles

NOW = datetime.now(UTC)
EXPIRED: Final[dict[str, Any]] = {
    "not_before": NOW - timedelta(days=9),
    "not_after": NOW - timedelta(days=2),
}
EARLY: Final[dict[str, Any]] = {
    "not_before": NOW + timedelta(days=2),
    "not_after": NOW + timedelta(days=9),
}
RECENT: Final[dict[str, Any]] = {
    "not_before": NOW - timedelta(days=1),
    "not_after": NOW + timedelta(days=90),
}


class Authority:
    """Its own certificate is `pem`; `issue` writes another and its key."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._ca = trustme.CA()
        self.pem = folder / "ca.pem"
        self._ca.cert_pem.write_to_path(str(self.pem))

    def issue(self, *names: str, client_ca: Path | None = None, **validity: Any) -> TlsFiles:
        """For 127.0.0.1 and localhost, unless other names are given."""
        made = self._ca.issue_cert(*(names or ("localhost", "127.0.0.1")), **(RECENT | validity))
        folder = self._folder / made.private_key_pem.bytes().hex()[80:96]
        folder.mkdir(exist_ok=True)
        cert, key = folder / "cert.pem", folder / "key.pem"
        made.private_key_pem.write_to_path(str(key))
        cert.write_bytes(b"".join(pem.bytes() for pem in made.cert_chain_pems))
        return TlsFiles(cert=cert, key=key, client_ca=client_ca)

    def trusting(self, own: TlsFiles | None = None) -> TLS:
        """A client's: whom it trusts, and who it is."""
        if own is None:
            return TLS(ca=self.pem)
        return TLS(ca=self.pem, cert=own.cert, key=own.key)


def settings_of(files: TlsFiles) -> dict[str, Path | None]:
    """As the gateway takes them."""
    return {"tls_cert": files.cert, "tls_key": files.key, "tls_client_ca": files.client_ca}


def renew(old: TlsFiles, new: TlsFiles) -> None:
    """Put other contents under the names that a server follows."""
    for source, target in ((new.cert, old.cert), (new.key, old.key)):
        draft = target.with_suffix(".new")
        shutil.copy(source, draft)
        draft.replace(target)
