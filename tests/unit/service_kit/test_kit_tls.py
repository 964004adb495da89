"""A server's certificate: checked with a sentence, renewed while it runs, kept when it is wrong."""

import ssl
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from structlog.testing import capture_logs

from service_kit.errors import ConfigError
from service_kit.tls import ServerTls, TlsFiles
from tests.support.tls_files import EARLY, EXPIRED, Authority, encrypted, renew


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def text(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def of_another_kind(tmp_path: Path) -> Path:
    key = Ed25519PrivateKey.generate()
    form = (Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return text(tmp_path / "ed25519.pem", key.private_bytes(*form))


def with_another_key(cert: Path, tmp_path: Path) -> Path:
    """Of a kind that nobody knows: said by an identifier, read when the key is looked at."""
    pem = cert.read_text()
    whole = ssl.PEM_cert_to_DER_cert(pem[: pem.index("-----END") + len(END)])
    unknown = whole.replace(bytes.fromhex("2a8648ce3d0201"), bytes.fromhex("2a8648ce3d027f"))
    assert unknown != whole
    return text(tmp_path / "unknown.pem", ssl.DER_cert_to_PEM_cert(unknown).encode())


END = "-----END CERTIFICATE-----"
Wrong = Callable[[Authority, TlsFiles, Path], TlsFiles]
WRONG: dict[str, tuple[Wrong, str]] = {
    "no file": (
        lambda _a, files, _t: replace(files, cert=Path("/nowhere.pem")),
        "--tls-cert /nowhere.pem cannot be read: No such file or directory",
    ),
    "no key file": (
        lambda _a, files, _t: replace(files, key=Path("/nowhere.pem")),
        "--tls-key /nowhere.pem cannot be read",
    ),
    "a folder": (lambda _a, files, tmp: replace(files, key=tmp), "--tls-key .*Is a directory"),
    "no PEM": (
        lambda _a, files, tmp: replace(files, cert=text(tmp / "x", b"\0x")),
        "--tls-cert .* holds no certificate in PEM",
    ),
    "empty": (
        lambda _a, files, tmp: replace(files, cert=text(tmp / "x", b"")),
        "--tls-cert .* holds no certificate in PEM",
    ),
    "no key": (
        lambda _a, files, _t: replace(files, key=files.cert),
        "--tls-key .* holds no private key in PEM",
    ),
    "expired": (
        lambda ca, _f, _t: ca.issue(**EXPIRED),
        r"--tls-cert .*: the certificate has expired, on \d{4}-\d\d-\d\d \d\d:\d\d UTC",
    ),
    "too early": (
        lambda ca, _f, _t: ca.issue(**EARLY),
        r"--tls-cert .*: the certificate is not valid before \d{4}-",
    ),
    "another key": (
        lambda ca, files, _t: replace(files, key=ca.issue().key),
        "--tls-key .* does not belong to the certificate: --tls-cert .* must begin with",
    ),
    "encrypted": (
        lambda _a, files, tmp: replace(files, key=encrypted(files.key, tmp)),
        "--tls-key .* is encrypted, and nobody is here to be asked",
    ),
    "unknown to gRPC": (
        lambda _a, files, tmp: replace(files, key=of_another_kind(tmp)),
        "--tls-key .* must be an RSA or an EC key",
    ),
    "of an unknown key": (
        lambda _a, files, tmp: replace(files, cert=with_another_key(files.cert, tmp)),
        "--tls-cert .*: the certificate cannot be used: Unknown key type",
    ),
    "no authority": (
        lambda _a, files, _t: replace(files, client_ca=files.key),
        "--tls-client-ca .* holds no certificate in PEM",
    ),
    "expired authority": (
        lambda _a, files, tmp: replace(files, client_ca=Authority(tmp, **EXPIRED).pem),
        r"--tls-client-ca .*: the certificate has expired, on \d{4}-",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_files_end_the_start_with_a_sentence(
    authority: Authority, tmp_path: Path, case: str
) -> None:
    make, says = WRONG[case]
    with pytest.raises(ConfigError, match=says) as caught:
        ServerTls(make(authority, authority.issue(), tmp_path))
    assert "SSL" not in str(caught.value)


@pytest.mark.parametrize("given", ["tls_cert", "tls_key", "tls_client_ca"])
def test_a_flag_alone_ends_the_start(given: str) -> None:
    nothing = dict.fromkeys(("tls_cert", "tls_key", "tls_client_ca"))
    assert ServerTls.of(SimpleNamespace(**nothing)) is None
    with pytest.raises(ConfigError, match="--tls-cert needs --tls-key"):
        ServerTls.of(SimpleNamespace(**(nothing | {given: Path("a.pem")})))


def shown(server: ssl.SSLContext, authority: Authority) -> bytes:
    """The certificate that a new client is shown, without a network."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    theirs = server.wrap_bio(to_server, to_client, server_side=True)
    context = authority.trusting().context()
    ours = context.wrap_bio(to_client, to_server, server_hostname="localhost")
    waiting = [ours, theirs]
    for side in waiting * 4:
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    seen = ours.getpeercert(binary_form=True)
    assert seen is not None
    return seen


def der(files: TlsFiles) -> bytes:
    pem = files.cert.read_text()
    return ssl.PEM_cert_to_DER_cert(pem[: pem.index("-----END") + len("-----END CERTIFICATE-----")])


async def test_a_renewed_pair_is_shown_to_new_connections(authority: Authority) -> None:
    files, new = authority.issue(), authority.issue()
    server = ServerTls(files)
    assert server._newer_for_grpc() is None
    assert shown(server.http_context, authority) == der(files)
    with capture_logs() as logs:
        await server.look()
        assert logs == []
        renew(files, new)
        await server.look()
    assert [entry["event"] for entry in logs] == ["tls.replaced"]
    assert shown(server.http_context, authority) == der(new)
    assert server._newer_for_grpc() is server._loaded.configuration
    assert server._newer_for_grpc() is None


@pytest.mark.parametrize("wrong", ["half", "expired", "gone", "of an unknown key"])
async def test_a_wrong_renewal_changes_nothing_and_is_explained_once(
    authority: Authority, wrong: str, tmp_path: Path
) -> None:
    """A half is what a renewal looks like between its two files."""
    files = authority.issue()
    server, right = ServerTls(files), der(files)
    old_cert = files.cert.read_bytes()
    if wrong == "gone":
        files.cert.unlink()
    elif wrong == "of an unknown key":
        with_another_key(files.cert, tmp_path).replace(files.cert)
    else:
        other = authority.issue(**EXPIRED) if wrong == "expired" else authority.issue()
        files.cert.write_bytes(other.cert.read_bytes())
    with capture_logs() as logs:
        await server.look()
        await server.look()
        assert shown(server.http_context, authority) == right
        assert server._newer_for_grpc() is None
        files.cert.write_bytes(old_cert)
        await server.look()
    (entry,) = logs
    assert (entry["event"], entry["log_level"]) == ("tls.kept", "error")
    assert str(files.cert) in entry["reason"]


def test_old_protocols_and_weak_ciphers_are_refused(authority: Authority) -> None:
    context = ServerTls(authority.issue()).http_context.current
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    old = [each["name"] for each in context.get_ciphers() if each["protocol"] == "TLSv1.2"]
    assert old
    assert [name for name in old if "ECDHE" not in name] == []
    assert [name for name in old if "GCM" not in name and "CHACHA20" not in name] == []


async def test_a_certificate_that_ends_soon_is_a_warning_every_day(authority: Authority) -> None:
    with capture_logs() as logs:
        late = ServerTls(authority.issue())
        soon = ServerTls(authority.issue(not_after=EARLY["not_before"]))
        for server in (late, soon):
            await server.look()
            server._expiry.said = datetime.now(UTC) - timedelta(days=1)
            await server.look()
            await server.look()
    assert [(entry["event"], entry["log_level"]) for entry in logs] == [
        ("tls.loaded", "info"),
        ("tls.loaded", "warning"),
        ("tls.ends_soon", "warning"),
    ]
