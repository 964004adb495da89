"""What `kaiten serve` is told in confidence stays off every command line, and out of its logs."""

import subprocess
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from kaiten.cli.keygen import mint
from kaiten.client import TLS
from kaiten.client.errors import UnauthenticatedError
from tests.support.served import WAIT_S, Served
from tests.support.store_server import StoreServer, own_store
from tests.support.tls_files import Authority

PASSWORD = "pw-5f1d0c27"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreServer]:
    """Somebody else's, with a password; the settings that the ledger asks for."""
    with own_store(tmp_path / "store", requirepass=PASSWORD) as server:
        yield server


def of_parts(serve: psutil.Process) -> bytes:
    """The command lines of all that it has started."""
    told = b""
    for each in serve.children(recursive=True):
        # It may end while it is looked at.
        with suppress(OSError):
            told += Path(f"/proc/{each.pid}/cmdline").read_bytes()
    for part in (b"scheduler_svc", b"gpu_worker", b"gateway"):
        assert part in told
    return told


def check_nothing_was_told(served: Served) -> None:
    for log in (served.data_dir / "logs").glob("*.log"):
        assert PASSWORD not in log.read_text()
    assert PASSWORD not in served.said + (served.data_dir / "said").read_text()


def test_a_password_of_the_environment_is_on_no_command_line_and_snippets_answer_to_a_key(
    store: StoreServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Command lines can be read by every user of the machine, environments by their owner only.

    Snippets are pasted as they are, by somebody who has exported a key and a certificate; nobody
    else is let in. The supervisor has no certificate, and finds its gateway well.
    """
    key, entry = mint("acme")
    keys, authority = tmp_path / "keys.toml", Authority(tmp_path / "authority")
    keys.write_text(entry)
    server, own = authority.issue(), authority.issue("me@example.org")
    flags = ("--tls-cert", server.cert, "--tls-key", server.key, "--tls-client-ca", authority.pem)
    words, environ = ("--api-keys-file", keys, *flags), {"KAITEN_REDIS_URL": store.url}
    with Served(tmp_path / "data", *map(str, words), environ=environ) as served:
        for name, value in (("CERT", own.cert), ("KEY", own.key)):
            monkeypatch.setenv(f"KAITEN_TLS_{name}", str(value))
        for given in (key, "kt-other"):
            monkeypatch.setenv("KAITEN_API_KEY", given)
            check_curl(served, is_let_in=given == key)
            with nullcontext() if given == key else pytest.raises(UnauthenticatedError):
                exec(compile(served.program(), "snippet", "exec"), {})
            assert bool(capsys.readouterr().out.strip()) is (given == key)
        assert key not in served.said
        serve = psutil.Process(served.process.pid)
        told = of_parts(serve) + " ".join(serve.cmdline()).encode()
        assert served.stop() == 0
    assert PASSWORD.encode() not in told
    check_nothing_was_told(served)


def check_curl(served: Served, *, is_let_in: bool) -> None:
    words = subprocess.run(
        # curl itself may not be here; what it is told, a shell has made.
        ["sh", "-c", f'curl() {{ printf "%s\\n" "$@"; }}; {served.snippet("curl ")}'],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    headers = [words[at + 1] for at, word in enumerate(words) if word == "-H"]
    trusted = [words[words.index(f"--{name}") + 1] for name in ("cacert", "cert", "key")]
    reply = httpx.post(
        next(word for word in words if word.startswith("https://")),
        content=words[words.index("-d") + 1],
        headers=dict(header.split(": ", 1) for header in headers),
        timeout=WAIT_S,
        verify=TLS(ca=trusted[0], cert=trusted[1], key=trusted[2]).context(),
    )
    assert reply.status_code == (200 if is_let_in else 401)
