"""What is wrong when a service starts: it ends with one sentence that says what to do."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from kaiten.mini import CHECKPOINT
from ledger.acl import commands_rule, keys_rule
from ledger.keys import Keys
from tests.support.cluster import argv_of
from tests.support.processes import GATEWAY, SCHEDULER, WORKER, ServiceProcess, events
from tests.support.store_server import StoreServer, own_store
from tests.support.tls_files import EXPIRED, Authority

OF_THE_STORE = pytest.mark.parametrize("module", [GATEWAY, SCHEDULER])
OF_ALL = pytest.mark.parametrize("module", [GATEWAY, SCHEDULER, WORKER])
REFUSED = 2


def refusal(module: str, folder: Path, **flags: Any) -> str:
    """Why it does not start. It has ended, and was never ready."""
    own: dict[str, dict[str, Any]] = {
        GATEWAY: {"model": CHECKPOINT, "http_port": 0},
        SCHEDULER: {},
        WORKER: {"model": CHECKPOINT, "scheduler": "127.0.0.1:1"},
    }
    argv = argv_of({"grpc_port": 0, **own[module], **flags})
    process = ServiceProcess(name="wrong", module=module, argv=argv, log_path=folder / "log")
    process.start()
    assert process.join() == REFUSED, process.log()
    assert not events(process, "service.ready")
    (refused,) = events(process, "service.refused")
    assert "Traceback" not in process.log()
    return str(refused["reason"])


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    """A store without persistence."""
    with own_store(tmp_path_factory.mktemp("forgetful"), appendonly="no") as server:
        yield server


@OF_THE_STORE
def test_a_store_without_persistence(module: str, forgetful: StoreServer, tmp_path: Path) -> None:
    reason = refusal(module, tmp_path, redis_url=forgetful.url)
    assert "appendonly must be yes, or a restart of the store loses accepted requests" in reason
    assert "Fix: CONFIG SET appendonly yes" in reason


@OF_THE_STORE
def test_a_wrong_password(module: str, redis_url: str, cell: str, tmp_path: Path) -> None:
    url = redis_url.replace("redis://", "redis://kaiten:s3cret@")
    reason = refusal(module, tmp_path, redis_url=url, cell=cell)
    assert "the store must accept the url's user and password" in reason
    assert "s3cret" not in (tmp_path / "log").read_text()


@OF_THE_STORE
@pytest.mark.parametrize(
    ("keys", "commands", "sentence"),
    [
        ("{cell}", "-xadd", "must be allowed XADD"),
        ("{cell}", "-evalsha", "must be allowed the keys kaiten:{{{cell}}}:*, EVALSHA and"),
        ("{cell}-other", "", "Fix: ACL SETUSER USER resetkeys ~kaiten:"),
    ],
)
def test_a_user_of_the_store_that_may_do_too_little(
    module: str, keys: str, commands: str, sentence: str, redis_url: str, cell: str, tmp_path: Path
) -> None:
    rules = f"reset on >pw {keys_rule(keys.format(cell=cell))} {commands_rule()} {commands}"
    user = f"short-{cell}"
    with Redis.from_url(redis_url) as admin:
        admin.execute_command("ACL", "SETUSER", user, *rules.split())
        try:
            url = redis_url.replace("redis://", f"redis://{user}:pw@")
            reason = refusal(module, tmp_path, redis_url=url, cell=cell)
        finally:
            admin.execute_command("ACL", "DELUSER", user)
    assert sentence.format(cell=cell) in reason


@pytest.mark.parametrize("flag", ["grpc_port", "http_port"])
def test_a_port_that_is_taken(flag: str, redis_url: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        taken = holder.getsockname()[1]
        reason = refusal(GATEWAY, tmp_path, redis_url=redis_url, **{flag: taken})
    assert f"--{flag.replace('_', '-')}" in reason


@OF_ALL
def test_a_credential_that_is_not_there(module: str, redis_url: str, tmp_path: Path) -> None:
    flags = {} if module == WORKER else {"redis_url": redis_url}
    missing = tmp_path / "peers"
    reason = refusal(module, tmp_path, peer_credential_file=missing, **flags)
    assert f"--peer-credential-file {missing} cannot be read" in reason


@OF_ALL
def test_a_certificate_that_has_expired(module: str, redis_url: str, tmp_path: Path) -> None:
    part = Authority(tmp_path).issue_to_part("part", **EXPIRED)
    flags = {} if module == WORKER else {"redis_url": redis_url}
    files = {"peer_tls_cert": part.cert, "peer_tls_key": part.key, "peer_tls_ca": part.ca}
    reason = refusal(module, tmp_path, **files, **flags)
    assert f"--peer-tls-cert {part.cert}: the certificate has expired, on " in reason


@OF_THE_STORE
def test_a_cell_that_another_version_wrote(
    module: str, redis_url: str, cell: str, tmp_path: Path
) -> None:
    with Redis.from_url(redis_url) as admin:
        admin.hset(Keys(cell).meta, "schema", "999")
    reason = refusal(module, tmp_path, redis_url=redis_url, cell=cell)
    assert "was written with schema 999, but this version reads schema 1. Fix: use ano" in reason
