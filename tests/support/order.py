"""A pytest plugin: what takes long begins first; nothing long is left when the rest is done.

Under xdist's worksteal each process gets an equal run of the collected tests, and who has none left
takes from the end of another's. So the files of `FIRST` are dealt to the fronts of these runs, each
file whole: its tests share what they start. `make test ARGS='-p tools.cpu_plugin'` says which.

Each process imports every test. In a fresh clone that compiles them, so each begins with folders of
its own, and finds those of the others compiled.
"""

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Final, TypeVar

import pytest

# Below `tests`; those with a test of many seconds, and those of few tests that take long together.
# Two processes get every second one each: those that ask transformers import it in the same.
FIRST: Final = (
    "parity/test_stack_parity.py",
    "integration/test_compose_rehearsal.py",
    "unit/kernels/test_aot_table.py",
    "fuzz/test_fuzz_doors.py",
    "integration/test_stack_faults.py",
    "unit/kernels/test_triton_kernels.py",
    "unit/tools/test_mini.py",
    "unit/tools/test_mutants.py",
    "parity/test_triton_parity.py",
    "front_door/test_front_door_clients.py",
    "integration/test_serve_secrets.py",
    "integration/test_kaiten_serve.py",
    "integration/test_health_lies.py",
    "integration/test_scheduler_workers.py",
    "integration/test_scheduler_leaders.py",
    "parity/test_stack_sampling.py",
    "unit/bench/test_gpu_run.py",
    "unit/tools/test_flakes.py",
    "contract/test_processes_end.py",
    "integration/test_bench_end_to_end.py",
    "integration/test_no_workers.py",
    "integration/test_batches_survive.py",
    "integration/test_responses_survive.py",
    "integration/test_llm.py",
    "parity/test_logit_rules_parity.py",
    "openai/test_openai_responses.py",
    "parity/test_template_parity.py",
    "integration/test_kaiten_run.py",
    "integration/test_scheduler_archive.py",
    "unit/gateway/children/test_schema_rewrites.py",
    "sim/test_scheduler_sim.py",
)


Item = TypeVar("Item")
TESTS: Final = Path(__file__).parents[1]


def pytest_configure(config: pytest.Config) -> None:
    workerinput = getattr(config, "workerinput", None)
    if workerinput is not None and [Path(each).absolute() for each in config.args] == [TESTS]:
        own = int(workerinput["workerid"].removeprefix("gw"))
        config.args[:] = begun_at(own, int(workerinput["workercount"]))


def begun_at(own: int, processes: int) -> list[str]:
    """All folders of tests, from where this process begins; those of `unit` each by itself."""
    parts = [*TESTS.glob("*/"), *(TESTS / "unit").glob("*/")]
    found = [part for part in parts if part.name != "unit" and any(part.rglob("test_*.py"))]
    folders = sorted(map(str, found))
    at = own * len(folders) // processes
    return folders[at:] + folders[:at]


# When those are gone that no mark selects: runs are dealt by what is left.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    workerinput = getattr(config, "workerinput", None)
    if workerinput is not None:
        # Of one file they are in order, and every process must have all in the same.
        items.sort(key=file_of)
        items[:] = dealt(items, file_of, int(workerinput["workercount"]))


def file_of(item: pytest.Item) -> str:
    """Below `tests`."""
    return item.nodeid.partition("::")[0].removeprefix("tests/")


def dealt(items: list[Item], file_of: Callable[[Item], str], processes: int) -> list[Item]:
    """A run for each process, its share of FIRST in front; equally long, if that can be."""
    files: dict[str, list[Item]] = {name: [] for name in FIRST}
    others: list[Item] = []
    for item in items:
        files.get(file_of(item), others).append(item)
    found = [file for file in files.values() if file]
    ordered: list[Item] = []
    for at in range(processes):
        service = list(chain.from_iterable(found[at::processes]))
        # As xdist shares out what is left among the processes that are left.
        length = (len(items) - len(ordered)) // (processes - at)
        count = max(0, length - len(service))
        ordered += [*service, *others[:count]]
        del others[:count]
    return [*ordered, *others]
