"""Authorities of a test's own, and certificates of theirs in files."""

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import trustme
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from kaiten.client import TLS
from service_kit.tls import Certificates, TlsFiles

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

    def __init__(self, folder: Path, **validity: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._issued = folder, 0
        self._ca = trustme.CA()
        self.pem = folder / "ca.pem"
        self.pem.write_bytes(self._ca.cert_pem.bytes() if not validity else self._own(validity))

    def _own(self, validity: dict[str, Any]) -> bytes:
        """Its own certificate, of another time than trustme's: all others."""
        own, key = self._ca._certificate, self._ca._private_key
        made = x509.CertificateBuilder(own.issuer, own.subject, own.public_key())
        made = made.serial_number(own.serial_number)
        made = made.not_valid_before(validity["not_before"])
        made = made.not_valid_after(validity["not_after"])
        for each in own.extensions:
            made = made.add_extension(each.value, each.critical)
        return made.sign(key, SHA256()).public_bytes(Encoding.PEM)

    def issue(self, *names: str, client_ca: Path | None = None, **validity: Any) -> TlsFiles:
        """For 127.0.0.1 and localhost, unless other names are given."""
        self._issued += 1
        cert, key = self._write(f"issued-{self._issued}", names, validity)
        return TlsFiles(cert=cert, key=key, client_ca=client_ca)

    def issue_to_part(self, part: str, *names: str, **validity: Any) -> Certificates:
        """As parts have them. A second one of a part takes the place of its first."""
        cert, key = self._write(part, names, validity)
        return Certificates(cert=cert, key=key, ca=self.pem)

    def _write(
        self, place: str, names: tuple[str, ...], validity: dict[str, Any]
    ) -> tuple[Path, Path]:
        made = self._ca.issue_cert(*(names or ("localhost", "127.0.0.1")), **(RECENT | validity))
        folder = self._folder / place
        folder.mkdir(exist_ok=True)
        cert, key = folder / "cert.pem", folder / "key.pem"
        made.private_key_pem.write_to_path(str(key))
        cert.write_bytes(b"".join(pem.bytes() for pem in made.cert_chain_pems))
        return cert, key

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


def encrypted(key: Path, folder: Path) -> Path:
    """The same key in a file there, behind a password."""
    loaded = load_pem_private_key(key.read_bytes(), None)
    form = (Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    path = folder / "encrypted.pem"
    path.write_bytes(loaded.private_bytes(*form))
    return path
