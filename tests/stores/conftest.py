"""A cluster and a group with Sentinels for all stories of a file; each finds every server well."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.store_group import Group, SentinelGroup, StoreCluster


class Lent:
    """A group as a cell's store: it was there before, and it stays."""

    def __init__(self, group: Group, folder: Path) -> None:
        self.folder = folder
        self.url = group.url

    def start(self) -> None:
        """It runs."""

    def close(self) -> None:
        """Others need it."""


@pytest.fixture(scope="module")
def store_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreCluster]:
    with StoreCluster(tmp_path_factory.mktemp("cluster")) as group:
        yield group


@pytest.fixture(scope="module")
def sentinel_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SentinelGroup]:
    with SentinelGroup(tmp_path_factory.mktemp("sentinels")) as group:
        yield group


@pytest.fixture
def lent(tmp_path: Path) -> Callable[[Group], Lent]:
    """`lent(group)`: everything in it works and it is empty."""

    def lend(group: Group) -> Lent:
        group.heal()
        return Lent(group, tmp_path / "lent")

    return lend
