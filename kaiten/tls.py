"""Whom a client trusts and who it is, and what it says when a handshake fails."""

import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from os import PathLike
from os.path import expanduser
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

# gRPC takes longer to import than `kaiten --help` may take.
if TYPE_CHECKING:
    import grpc

Options: TypeAlias = Sequence[tuple[str, str | int]]

# gRPC takes the proxy of HTTP_PROXY and its like for whatever NO_PROXY does not name.
DIRECT: Final = (("grpc.enable_http_proxy", 0),)
# Before addresses, as gRPC writes them. There may be several behind the first two.
SEVERAL: Final = ("ipv4:", "ipv6:")
SCHEMES: Final = (*SEVERAL, "dns:///", "dns:")
SOCKET: Final = "unix:"
PORT: Final = re.compile(r":([0-9]+)(?=[/,]|$)", re.ASCII)
PORT_MAX: Final = 65535
ANOTHER_NAME: Final = "is for another name than the one the gateway was called by"
# Parts of what gRPC or Python says, in order, and the sentence that it is for the user.
CERTIFICATE_PROBLEMS: Final = (
    ("certificate has expired", "has expired"),
    ("certificate is not yet valid", "is not valid yet: is this machine's clock right?"),
    ("Hostname Verification", ANOTHER_NAME),
    ("certificate is not valid for", ANOTHER_NAME),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "is of an authority that is not trusted here: name its file (--tls-ca, or TLS(ca=...))",
    ),
    ("WRONG_VERSION_NUMBER", "is missing: it does not speak TLS on this port"),
)
# The server ended a connection that had only begun: what it does to whoever it does not let in.
NOT_CONNECTED: Final = ("failed to connect to all addresses", "connections to all backends failing")
HTTP_1: Final = "Trying to connect an http1.x server"
HTTP_1_HINT: Final = "this port speaks HTTP/1; the gRPC API has one of its own (50051 by default)"
TURNED_AWAY: Final = "Socket closed"
TURNED_AWAY_HINT: Final = (
    "the connection was ended at once: it may speak TLS only (--tls, or tls=True), or want a"
    " client certificate of its authority (--tls-cert and --tls-key, or TLS(cert=..., key=...))"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TLS:
    """Files in PEM. `ca`: the authorities to trust (or the gateway's own certificate), instead of
    the system's. `cert` and `key`: who we are, for a gateway that asks.
    """

    ca: str | PathLike[str] | None = None
    cert: str | PathLike[str] | None = None
    key: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        """ValueError: half of a pair."""
        if (self.cert is None) != (self.key is None):
            raise ValueError("tls: cert and key go together")

    def credentials(self) -> "grpc.ChannelCredentials":
        """ValueError names the file that cannot be read, or used."""
        import grpc

        ca = system_authorities() if self.ca is None else _read("ca", self.ca)
        pair = [_read("key", self.key), _read("cert", self.cert)] if self.key and self.cert else []
        if self.ca is not None or pair:
            # gRPC takes whatever they hold: then no connection comes about, and nobody knows why.
            self.context()
        return grpc.ssl_channel_credentials(ca, *pair)

    def context(self) -> ssl.SSLContext:
        """For clients of the HTTP API. ValueError names the file that cannot be used."""
        try:
            ca = None if self.ca is None else expanduser(self.ca)
            context = ssl.create_default_context(cafile=ca)
            # As gRPC: what is trusted need not be an authority, so it may be the gateway's own.
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            if self.cert is not None and self.key is not None:
                # Left alone OpenSSL asks for a key's password at the terminal.
                context.load_cert_chain(
                    expanduser(self.cert), expanduser(self.key), password=lambda: b""
                )
        except OSError as error:
            files = ", ".join(str(each) for each in (self.ca, self.cert, self.key) if each)
            raise ValueError(f"tls: {files} cannot be used: {error}") from None
        return context


def verifier(url: str, tls: TLS | None) -> ssl.SSLContext | bool:
    """What httpx judges the server of `url` by. ValueError as `context`.

    Nobody at http:// has a certificate, and to read the system's takes 60 ms of a processor.
    """
    if tls is None and url.startswith("http://"):
        return False
    return (tls or TLS()).context()


def system_authorities() -> bytes | None:
    """The file that OpenSSL reads here (SSL_CERT_FILE changes it). None: gRPC's own list."""
    path = ssl.get_default_verify_paths().cafile
    return Path(path).read_bytes() if path else None


def check_address(address: str) -> None:
    """ValueError: gRPC would ask somebody else: of a larger port it takes the lower 16 bits."""
    if not address:
        raise ValueError("the address is empty: it must be host:port")
    if address.startswith(SOCKET):
        return
    if "," in address and not address.rpartition("//")[2].startswith(SEVERAL):
        raise ValueError(f"{address}: several are written ipv4:HOST:PORT,HOST:PORT")
    ports = PORT.findall(address)
    if wrong := next((port for port in ports if not 1 <= int(port) <= PORT_MAX), None):
        raise ValueError(f"{address}: a port must be from 1 to {PORT_MAX}, got {wrong}")


def channel(address: str, tls: TLS | bool, options: Options = ()) -> "grpc.Channel":
    """To a gateway; to one of this machine by no proxy. ValueError: `tls` names a file that cannot
    be read.
    """
    import grpc

    options = (*options, *_direct(address))
    if (credentials := _credentials(tls)) is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, credentials, options=options)


def aio_channel(address: str, tls: TLS | bool, options: Options = ()) -> "grpc.aio.Channel":
    """The same for asyncio."""
    import grpc

    options = (*options, *_direct(address))
    if (credentials := _credentials(tls)) is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


def certificate_problem(details: str) -> str:
    """A sentence, for what is said of a connection whose certificate was refused; else empty."""
    for part, sentence in CERTIFICATE_PROBLEMS:
        if part in details:
            return f"the gateway's certificate {sentence}"
    return ""


def explained(details: str) -> str:
    """What gRPC says, and what may be behind it where it does not know."""
    if HTTP_1 in details:
        return HTTP_1_HINT
    if TURNED_AWAY in details and details.startswith(NOT_CONNECTED):
        return f"{details}; {TURNED_AWAY_HINT}"
    return details


def _direct(address: str) -> Options:
    """`address`: as gRPC has them, one or several."""
    for scheme in SCHEMES:
        address = address.removeprefix(scheme)
    return DIRECT if all(map(_is_here, address.split(","))) else ()


def _is_here(place: str) -> bool:
    host = place.rpartition(":")[0].strip("[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _credentials(tls: TLS | bool) -> Any:
    if not tls:
        return None
    return (TLS() if tls is True else tls).credentials()


def _read(name: str, path: str | PathLike[str]) -> bytes:
    try:
        return Path(expanduser(path)).read_bytes()
    except OSError as error:
        raise ValueError(f"tls: {name} {path} cannot be read: {error.strerror}") from None
