"""How a command reaches a gateway that speaks TLS: the same flags and variables for all."""

import sys
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path
from typing import Annotated, Final

from cyclopts import Parameter

from kaiten.tls import TLS, check_address

SECURE: Final = ("https://", "grpcs://")
PLAIN: Final = ("grpc://", "http://")


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class TlsOptions:
    """Flags of every command that talks to a gateway. One of them is enough to speak TLS."""

    tls: Annotated[
        bool,
        Parameter(
            env_var="KAITEN_TLS",
            show_default=False,
            help="speak TLS, trust the system's authorities; as https:// before the address",
        ),
    ] = False
    tls_ca: Annotated[
        Path | None,
        Parameter(env_var="KAITEN_TLS_CA", help="PEM authorities to trust instead; means --tls"),
    ] = None
    tls_cert: Annotated[
        Path | None,
        Parameter(env_var="KAITEN_TLS_CERT", help="who we are, for gateways that ask; means --tls"),
    ] = None
    tls_key: Annotated[
        Path | None, Parameter(env_var="KAITEN_TLS_KEY", help="the key of --tls-cert")
    ] = None

    def of(self, address: str) -> tuple[str, TLS | None]:
        """host:port, and the TLS to speak with it. ValueError says what of it, or which file, is
        wrong."""
        check_address(address)
        scheme = next((each for each in (*SECURE, *PLAIN) if address.startswith(each)), "")
        ca, cert, key = map(_given, (self.tls_ca, self.tls_cert, self.tls_key))
        is_asked = self.tls or ca or cert or key
        if scheme in PLAIN and is_asked:
            raise ValueError(f"{address}: {scheme} is without TLS; write {SECURE[0]}, or nothing")
        if not (is_asked or scheme in SECURE):
            return address.removeprefix(scheme).rstrip("/"), None
        tls = TLS(ca=ca, cert=cert, key=key)
        tls.credentials()
        return address.removeprefix(scheme).rstrip("/"), tls

    def of_or_exit(self, address: str) -> tuple[str, TLS | None]:
        """The same; what is wrong ends the command with a sentence."""
        try:
            return self.of(address)
        except ValueError as error:
            print(error, file=sys.stderr)
            sys.exit(2)


def _given(path: Path | None) -> Path | None:
    """A variable that is empty names the current folder to a Path, and nothing to its user."""
    return None if path is None or path == Path() else Path(expanduser(path))


NO_TLS: Final = TlsOptions()
