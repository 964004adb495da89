"""What an earlier release left on wires and disks is understood by this one."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ledger import Ledger
from ledger.archive import Wanted, entries, verify
from scheduler_svc.replay import Compared, replay_archive
from tests.compat.release import (
    PROTOS,
    RELEASES,
    WORKER_FLAGS,
    dump,
    keep_something,
    load,
    require_kept,
    restored,
)
from tests.support.answers import until
from tests.support.cluster import Cluster
from tests.support.store_server import own_store

KEPT = sorted(RELEASES.iterdir())
BUF = Path(sys.executable).with_name("buf")


def breaking(protos: Path, against: Path) -> str:
    """What `buf breaking` finds; empty: nothing."""
    command = [str(BUF), "breaking", "--against", str(against)]
    found = subprocess.run(command, cwd=protos, capture_output=True, text=True, check=False)
    assert found.returncode in (0, 100), found.stderr
    return found.stdout


@pytest.fixture(params=KEPT, ids=lambda release: release.name)
def release(request: pytest.FixtureRequest) -> Path:
    """Each that is kept."""
    kept: Path = request.param
    return kept


def test_something_is_kept() -> None:
    assert KEPT


def test_no_message_means_something_else(release: Path) -> None:
    assert breaking(PROTOS, release / "protos.binpb") == ""


def test_another_meaning_is_found(release: Path, tmp_path: Path) -> None:
    changed = shutil.copytree(PROTOS, tmp_path / "protos")
    ledger = changed / "kaiten" / "v1" / "ledger.proto"
    ledger.write_text(ledger.read_text().replace("string tenant = 2;", "bytes tenant = 99;", 1))
    found = breaking(changed, release / "protos.binpb")
    assert 'Previously present field "2" with name "tenant"' in found


async def test_requests_of_its_store_go_on_and_its_results_are_read(
    release: Path, tmp_path: Path
) -> None:
    """Some of them over, some begun, some waiting: the tokens are the same as had it gone on."""
    cluster = Cluster(tmp_path, worker_flags=WORKER_FLAGS, is_started=False)
    async with cluster:
        cluster.store.start()
        outputs = await restored(release, cluster.store)
        for process in (*cluster.schedulers, *cluster.workers):
            process.start()
        await cluster.connect()
        if release.name != "0.2.0":
            await require_kept(cluster.ledger)
        for id, expected in outputs.items():

            async def is_over(id: str = id) -> bool:
                return await cluster.ledger.result(id) is not None

            await until(is_over, f"the end of {id}")
            result = await cluster.ledger.result(id)
            assert result is not None
            assert [list(choice.output.token_ids) for choice in result.choices] == expected


async def test_what_tenants_keep_is_in_what_is_kept_of_a_release(
    redis_url: str, cell: str, tmp_path: Path
) -> None:
    ledger = await Ledger.connect(redis_url, cell=cell)
    await keep_something(ledger)
    commands = await dump(redis_url, cell)
    await ledger.close()
    with own_store(tmp_path) as empty:
        await load(empty.url, commands)
        again = await Ledger.connect(empty.url, cell=cell)
        await require_kept(again)
        await again.close()


def test_its_archive_is_read_and_decided_again(release: Path) -> None:
    assert [problem for problem in verify([release / "archive"]) if not problem.is_told] == []
    records = [
        entry.record
        for entry in entries([release / "archive"], Wanted())
        if entry.HasField("record")
    ]
    assert sum(len(record.token_ids) for record in records) > 50
    # A later version may decide otherwise, but can always be asked.
    decided = list(replay_archive(entries([release / "archive"])))
    assert any(isinstance(one, Compared) for one in decided)
