"""TLS of a server's ports: one certificate for gRPC and HTTP, followed while the server runs; and
of parts among themselves.

A pair of files is checked before anything is made of it, and complaints are sentences: those of
OpenSSL are `[SSL] PEM lib`. New connections see what the files hold now; open ones go on with what
they began with. Files that have become wrong change nothing.
"""

import asyncio
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, Self

import grpc
import structlog

from service_kit.clock import Clock
from service_kit.errors import ConfigError

log = structlog.get_logger()

# How often the files are looked at.
LOOK_S: Final = 1.0
# Of TLS 1.2: forward secrecy and authenticated encryption only, as gRPC's own list. 1.3 has no
# others.
CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"
SOON_DAYS: Final = 14


class TlsSettings(Protocol):
    """The three flags, as a service's settings have them."""

    tls_cert: Path | None
    tls_key: Path | None
    tls_client_ca: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """`cert`: the server's, and those between it and its authority, in PEM. `client_ca`: whoever
    has no certificate of these authorities is not let in; None: everybody is."""

    cert: Path
    key: Path
    client_ca: Path | None = None


class Expiry(NamedTuple):
    """From when on nothing in a file of certificates is valid, by the flag that names it."""

    flag: str
    path: Path
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class _Loaded:
    """What the files held at one moment, checked; in the form of each port."""

    content: tuple[bytes, ...]
    # The certificate's first.
    expiries: tuple[Expiry, ...]
    context: ssl.SSLContext
    configuration: Any


class _RotatingContext(ssl.SSLContext):
    """asyncio is given one context for the life of a port and asks it once per connection. Loading
    another pair into a live context could fail half-way, with the new certificate and the old key.
    """

    current: ssl.SSLContext

    def wrap_bio(self, *given: Any, **named: Any) -> ssl.SSLObject:
        return self.current.wrap_bio(*given, **named)


class ExpiryNotice:
    """Tells of a certificate that ends soon, or has ended while it is used: once a day."""

    def __init__(self) -> None:
        self.said = datetime.min.replace(tzinfo=UTC)
        # Of what is used now.
        self.expiries: tuple[Expiry, ...] = ()

    def tell(self, *expiries: Expiry) -> None:
        """Of the one that ends first."""
        self.expiries, now = expiries, datetime.now(UTC)
        _, path, at = min(expiries, key=lambda expiry: expiry.at)
        if (at - now).days >= SOON_DAYS or now - self.said < timedelta(days=1):
            return
        self.said = now
        event, tell = ("expired", log.error) if at <= now else ("ends_soon", log.warning)
        tell(f"tls.{event}", cert=str(path), expires=_day(at))


class ServerTls:
    """The certificate of a server. ConfigError when its files are wrong at the start."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._loaded = _load(files)
        self._problem = ""
        self._expiry = ExpiryNotice()
        self._told_grpc = self._loaded
        self.http_context = _RotatingContext(ssl.PROTOCOL_TLS_SERVER)
        self.http_context.current = self._loaded.context
        self._say("tls.loaded")

    @classmethod
    def of(cls, chosen: TlsSettings) -> Self | None:
        """None: the settings name no certificate."""
        if chosen.tls_cert is None or chosen.tls_key is None:
            if (chosen.tls_cert, chosen.tls_key, chosen.tls_client_ca) != (None, None, None):
                raise ConfigError(
                    "--tls-cert needs --tls-key and the other way round; --tls-client-ca needs both"
                )
            return None
        return cls(
            TlsFiles(cert=chosen.tls_cert, key=chosen.tls_key, client_ca=chosen.tls_client_ca)
        )

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """For one gRPC server: gRPC asks at each handshake whether there is a newer pair."""
        return grpc.dynamic_ssl_server_credentials(
            self._loaded.configuration,
            self._newer_for_grpc,
            require_client_authentication=self._files.client_ca is not None,
        )

    def expiries(self) -> tuple[Expiry, ...]:
        """Of what new connections are shown, and whose certificates they may bring."""
        return self._loaded.expiries

    async def follow(self, clock: Clock) -> None:
        """Look at the files for as long as the server lives."""
        while True:
            await clock.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Take over what the files hold now. If that is wrong the old pair stays, and the log says
        why, once.
        """
        try:
            content = await asyncio.to_thread(_read, self._files)
            if content == self._loaded.content:
                self._problem = ""
                self._expiry.tell(*self._loaded.expiries)
                return
            loaded = await asyncio.to_thread(_load, self._files)
        except ConfigError as error:
            if str(error) != self._problem:
                log.error("tls.kept", reason=str(error))
            self._problem = str(error)
            return
        self._problem = ""
        self._loaded, self.http_context.current = loaded, loaded.context
        self._say("tls.replaced")

    def _newer_for_grpc(self) -> Any:
        """In a thread of gRPC's. None: the one it has. Making one anew costs reading a key."""
        loaded = self._loaded
        if loaded is self._told_grpc:
            return None
        self._told_grpc = loaded
        return loaded.configuration

    def _say(self, event: str) -> None:
        (_, cert, expires), now = self._loaded.expiries[0], datetime.now(UTC)
        tell = log.info
        if (expires - now).days < SOON_DAYS:
            tell, self._expiry.said = log.warning, now
        tell(event, cert=str(cert), expires=_day(expires))


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """Files of PEM: what we show to other parts, and whose we take."""

    cert: Path
    key: Path
    ca: Path
    _expiry: ExpiryNotice = field(
        default_factory=ExpiryNotice, init=False, compare=False, repr=False
    )

    def check(self) -> None:
        """ConfigError says which file cannot be used, or not now."""
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.cert, self.key, self._no_password)
        except OSError as error:
            raise ConfigError(
                f"--peer-tls-cert {self.cert} and --peer-tls-key {self.key} cannot be used: {error}"
            ) from None
        try:
            context.load_verify_locations(self.ca)
        except OSError as error:
            raise ConfigError(f"--peer-tls-ca {self.ca} cannot be used: {error}") from None
        cert, ca = ("--peer-tls-cert", self.cert), ("--peer-tls-ca", self.ca)
        _, of_cert = _leaf(*cert, _read_file(*cert))
        self._expiry.tell(of_cert, _authorities(*ca, _read_file(*ca)))

    def expiries(self) -> tuple[Expiry, ...]:
        """Of the files as they were when they could be used last."""
        with suppress(ConfigError):
            self.check()
        return self._expiry.expiries

    def _no_password(self) -> str:
        """OpenSSL would ask whoever sits at the terminal, and wait for them."""
        raise ConfigError(
            f"--peer-tls-key {self.key} is encrypted, and nobody is here to be asked for its"
            " password: openssl pkey -in FILE -out PLAIN, readable by this user only"
        )

    def for_channel(self) -> grpc.ChannelCredentials:
        """As the files are now."""
        ca, key, cert = (path.read_bytes() for path in (self.ca, self.key, self.cert))
        return grpc.ssl_channel_credentials(ca, key, cert)

    def for_server(self) -> grpc.ServerCredentials:
        """As the files are at each handshake."""
        return grpc.dynamic_ssl_server_credentials(
            self._now(), self._now_or_before, require_client_authentication=True
        )

    def _now(self) -> Any:
        ca, key, cert = (path.read_bytes() for path in (self.ca, self.key, self.cert))
        return grpc.ssl_server_certificate_configuration([(key, cert)], ca)

    def _now_or_before(self) -> Any:
        try:
            self.check()
            return self._now()
        except (OSError, ConfigError) as error:
            log.warning("certificates.kept", reason=str(error))
            return None


def _read(files: TlsFiles) -> tuple[bytes, ...]:
    """Certificate, key and, if asked for, client authorities."""
    given = [("--tls-cert", files.cert), ("--tls-key", files.key)]
    if files.client_ca is not None:
        given.append(("--tls-client-ca", files.client_ca))
    return tuple(_read_file(flag, path) for flag, path in given)


def _read_file(flag: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}") from None


def _load(files: TlsFiles) -> _Loaded:
    """ConfigError names the flag, the file and the rule."""
    content = cert, key, *rest = _read(files)
    expiries = [_check_pair(files, cert, key)]
    client_ca = rest[0] if rest else None
    if files.client_ca is not None and client_ca is not None:
        expiries.append(_authorities("--tls-client-ca", files.client_ca, client_ca))
    context = _context(files, client_ca)
    if _read(files) != content:
        raise ConfigError(f"--tls-cert {files.cert} is being written: it is read again in a moment")
    configuration = grpc.ssl_server_certificate_configuration([(key, cert)], client_ca)
    return _Loaded(
        content=content,
        expiries=tuple(expiries),
        context=context,
        configuration=configuration,
    )


def _check_pair(files: TlsFiles, cert: bytes, key: bytes) -> Expiry:
    """Of the certificate."""
    from cryptography.hazmat.primitives.asymmetric import ec, rsa
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    public, expiry = _leaf("--tls-cert", files.cert, cert)
    try:
        private = load_pem_private_key(key, None)
    except TypeError:
        raise ConfigError(
            f"--tls-key {files.key} is encrypted, and nobody is here to be asked for its password:"
            " openssl pkey -in FILE -out PLAIN, readable by this user only"
        ) from None
    except Exception:
        raise ConfigError(f"--tls-key {files.key} holds no private key in PEM") from None
    if not isinstance(private, rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey):
        raise ConfigError(f"--tls-key {files.key} must be an RSA or an EC key: gRPC has no other")
    if private.public_key() != public:
        raise ConfigError(
            f"--tls-key {files.key} does not belong to the certificate: --tls-cert {files.cert}"
            " must begin with the server's own"
        )
    return expiry


def _leaf(flag: str, path: Path, pem: bytes) -> tuple[Any, Expiry]:
    """The key of the first certificate of a file, and when it ends. ConfigError: it cannot be used,
    or not now."""
    first = _certificates(flag, path, pem)[:1]
    expiry = _expiry(flag, path, first)
    with _usable(f"{flag} {path}"):
        return first[0].public_key(), expiry


def _authorities(flag: str, path: Path, pem: bytes) -> Expiry:
    """While they are replaced there are old ones beside new ones. ConfigError: none can be used
    now."""
    return _expiry(flag, path, _certificates(flag, path, pem))


def _expiry(flag: str, path: Path, certificates: Sequence[Any]) -> Expiry:
    """Of the one that is valid the longest. ConfigError: none is."""
    now, where = datetime.now(UTC), f"{flag} {path}"
    with _usable(where):
        spans = [(each.not_valid_after_utc, each.not_valid_before_utc) for each in certificates]
    valid = [ends for ends, begins in spans if begins <= now < ends]
    if valid:
        return Expiry(flag, path, max(valid))
    ends, begins = max(spans)
    if ends <= now:
        raise ConfigError(f"{where}: the certificate has expired, on {_day(ends)}")
    raise ConfigError(f"{where}: the certificate is not valid before {_day(begins)}")


@contextmanager
def _usable(where: str) -> Iterator[None]:
    """Complaints about a certificate are of several unrelated families, when it is looked at."""
    try:
        yield
    except Exception as error:
        raise ConfigError(f"{where}: the certificate cannot be used: {error}") from None


def _certificates(flag: str, path: Path, pem: bytes) -> list[Any]:
    """At least one."""
    from cryptography.x509 import load_pem_x509_certificates

    try:
        return load_pem_x509_certificates(pem)
    except Exception:
        raise ConfigError(f"{flag} {path} holds no certificate in PEM") from None


def _context(files: TlsFiles, client_ca: bytes | None) -> ssl.SSLContext:
    """For HTTP; gRPC has its own TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(CIPHERS)
    context.set_alpn_protocols(["http/1.1"])
    try:
        # A password, so that OpenSSL asks nobody for one.
        context.load_cert_chain(files.cert, files.key, password="")
        if client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(cadata=client_ca.decode("ascii", "replace"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tls-cert {files.cert} cannot be used: {error}") from None
    return context


def _day(when: datetime) -> str:
    return f"{when:%Y-%m-%d %H:%M} UTC"
