"""What whoever uses a stack must know of its TLS: a name it is called by, and what to trust."""

from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicTls:
    """`cert`: the file of the certificate, which clients of this machine may trust as such."""

    cert: Path
    wants_client_cert: bool

    @classmethod
    def of(cls, cert: Path | None, client_ca: Path | None) -> Self | None:
        """As the gateway is told; None: no TLS."""
        if cert is None:
            return None
        wants_client_cert = client_ca is not None
        return cls(cert=Path(expanduser(cert)).resolve(), wants_client_cert=wants_client_cert)

    def name_for(self, host: str) -> str:
        """That address, if the certificate is for it; else a name that it is for. What is wrong
        with the file the gateway says."""
        try:
            names = _names(self.cert)
        except (OSError, ValueError):
            return host
        usable = [name for name in names if not name.startswith("*")]
        for wanted in (host.strip("[]"), "localhost"):
            if wanted in names:
                return host if wanted != "localhost" else wanted
        return next(iter(usable), host)


def _names(cert: Path) -> list[str]:
    """Names and addresses, in its order."""
    from cryptography import x509

    leaf = x509.load_pem_x509_certificates(cert.read_bytes())[0]
    try:
        named = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    addresses = named.get_values_for_type(x509.IPAddress)
    return [*named.get_values_for_type(x509.DNSName), *(str(each) for each in addresses)]
