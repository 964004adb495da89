"""What `kaiten serve` is told in confidence stays off every command line, and out of its logs."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from kaiten.cli.keygen import mint
from kaiten.client import TLS, Client
from tests.support.served import ENV, ROOT, WAIT_S, Served
from tests.support.store_server import StoreServer
from tests.support.tls_files import Authority

PASSWORD = "pw-5f1d0c27"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreServer]:
    """Somebody else's, with a password; the settings that the ledger asks for."""
    with StoreServer(tmp_path / "store", requirepass=PASSWORD) as server:
        yield server


@pytest.mark.parametrize("how", ["flag", "environment"])
def test_the_stores_password_is_on_no_command_line(
    store: StoreServer, tmp_path: Path, how: str
) -> None:
    """Command lines can be read by every user of the machine, environments by their owner only."""
    data = tmp_path / "data"
    words = ("--redis-url", store.url) if how == "flag" else ()
    environ = {} if how == "flag" else {"KAITEN_REDIS_URL": store.url}
    assert PASSWORD in store.url
    with Served(data, *words, environ=environ) as served:
        with Client(served.address) as client:
            assert client.complete("Once", max_tokens=4).choices[0].output_tokens == 4
        serve = psutil.Process(served.process.pid)
        processes = serve.children(recursive=True)
        if how == "environment":
            processes.append(serve)
        lines = [Path(f"/proc/{each.pid}/cmdline").read_bytes() for each in processes]
        assert served.stop() == 0
    told = b"\n".join(lines)
    for part in (b"scheduler_svc", b"gpu_worker", b"gateway"):
        assert part in told
    assert PASSWORD.encode() not in told
    for log in (data / "logs").glob("*.log"):
        assert PASSWORD not in log.read_text()
    assert PASSWORD not in served.said + (data / "said").read_text()


def test_the_snippets_answer_where_keys_and_certificates_are_asked_for(tmp_path: Path) -> None:
    """Pasted as they are, by somebody who has exported a key; nobody else is let in. The supervisor
    has no certificate, and finds its gateway well."""
    key, entry = mint("acme")
    keys, authority = tmp_path / "keys.toml", Authority(tmp_path / "authority")
    keys.write_text(entry)
    server, own = authority.issue(), authority.issue("me@example.org")
    shown = {"KAITEN_TLS_CERT": str(own.cert), "KAITEN_TLS_KEY": str(own.key)}
    flags = ("--tls-cert", server.cert, "--tls-key", server.key, "--tls-client-ca", authority.pem)
    with Served(tmp_path / "data", "--api-keys-file", str(keys), *map(str, flags)) as served:
        curl, python = served.snippet("curl "), served.said[served.said.index("<<'PY'") :]
        program = python.removeprefix("<<'PY'\n").rsplit("PY", 1)[0]
        for given, is_let_in in ((key, True), ("kt-other", False)):
            environ = ENV | shown | {"KAITEN_API_KEY": given}
            words = subprocess.run(
                # curl itself may not be here; what it is told, a shell has made.
                ["sh", "-c", f'curl() {{ printf "%s\\n" "$@"; }}; {curl}'],
                env=environ,
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
            ran = subprocess.run(
                [sys.executable, "-c", program],
                env=environ,
                capture_output=True,
                text=True,
                timeout=WAIT_S,
                cwd=ROOT,
                check=False,
            )
            assert (ran.returncode == 0) is is_let_in, ran.stderr
            assert bool(ran.stdout.strip()) is is_let_in
        assert key not in served.said
