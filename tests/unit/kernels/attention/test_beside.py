"""Long rows beside short ones: which stream each kernel is launched on, and what waits for what.

Of streams that are played, and of kernels that are only noted; on a GPU: tests/gpu/test_exact.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch

from kernels import variants
from kernels.attention import plan as attention_plan
from kernels.attention import triton_launch
from kernels.attention.plan import LONG_SPLIT, AttentionPlan, plan_attention, with_parts
from kernels.attention.triton_launch import _side_stream, paged_attention_triton

HEADS, KV_HEADS, HEAD_DIM, CHUNK = 4, 2, 16, 40
VARIANT = "chunks-beside-decodes"


class Stream:
    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self._told = name, told

    def wait_stream(self, other: "Stream") -> None:
        self._told.append(f"{self.name} waits for {other.name}")


class Played:
    """A device's streams, and kernels in place of those of `triton_launch`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[str] = []
        self.made = 0
        # What each kernel was given to keep parts in.
        self.sums: dict[str, int] = {}
        self.fails = ""
        self._current = Stream("here", self.told)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self._current)
        monkeypatch.setattr(torch.cuda, "Stream", self._make)
        monkeypatch.setattr(torch.cuda, "stream", self._on)
        monkeypatch.setattr(triton_launch, "_side_stream", cache(_side_stream.__wrapped__))
        monkeypatch.setattr(triton_launch, "attend_kernel", self._kernel("attend", sums_at=6))
        monkeypatch.setattr(triton_launch, "combine_kernel", self._kernel("combine", sums_at=1))
        monkeypatch.setattr(attention_plan, "_plan_kernel", self._kernel("", sums_at=0))

    def _make(self, device: torch.device) -> Stream:
        self.made += 1
        return Stream("side", self.told)

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def _kernel(self, name: str, *, sums_at: int) -> Any:
        played = self

        class Kernel:
            def __getitem__(self, grid: Any) -> Any:
                return self._launch

            def _launch(self, *given: Any, **named: Any) -> None:
                if name:
                    what = f"{name} {'long' if named['IS_LONG'] else 'short'}"
                    if what == played.fails:
                        raise RuntimeError("it cannot be launched")
                    played.told.append(f"{played._current.name}: {what}")
                    played.sums[what] = given[sums_at].data_ptr()

        return Kernel()


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    # Its tensors are a CPU's.
    monkeypatch.setattr(triton_launch, "_has_streams", lambda device: True)
    return Played(monkeypatch)


def plan_of(*, queries_max: int = CHUNK, context_max: int = LONG_SPLIT + 1) -> AttentionPlan:
    starts = torch.tensor([0, 1, 1 + CHUNK], dtype=torch.int32)
    plan = plan_attention(
        starts, torch.tensor([context_max, context_max]).int(), tokens=1 + CHUNK,
        group=HEADS // KV_HEADS, dtype=torch.bfloat16, queries_max=queries_max,
        context_max=context_max,
    )  # fmt: skip
    return with_parts(
        plan, rows=2, tokens=1 + CHUNK, kv_heads=KV_HEADS, group=HEADS // KV_HEADS,
        head_dim=HEAD_DIM,
    )  # fmt: skip


def attend(plan: AttentionPlan) -> None:
    q = torch.zeros(1 + CHUNK, HEADS, HEAD_DIM, dtype=torch.bfloat16)
    pages = torch.zeros(2, 1, KV_HEADS, 16, HEAD_DIM, dtype=torch.bfloat16)
    tables, contexts = torch.zeros(2, 1).int(), torch.ones(2).int()
    starts = torch.tensor([0, 1, 1 + CHUNK]).int()
    paged_attention_triton(q, pages[0], pages[1], tables, starts, contexts, 1.0, plan)


IN_TURNS = ["here: attend long", "here: combine long", "here: attend short", "here: combine short"]


def test_long_rows_are_beside_short_ones(played: Played) -> None:
    plan = plan_of()
    for _layer in range(2):
        attend(plan)
    assert played.told == 2 * [
        "side waits for here",
        "side: attend long",
        "side: combine long",
        "here: attend short",
        "here: combine short",
        "here waits for side",
    ]
    assert played.made == 1


def test_each_adds_up_its_own_parts(played: Played) -> None:
    attend(plan_of())
    sums = played.sums
    assert sums["attend long"] == sums["combine long"]
    assert sums["attend short"] == sums["combine short"]
    assert sums["attend long"] != sums["attend short"]


def test_where_they_would_share_a_room_they_take_turns(played: Played) -> None:
    with variants.forced(VARIANT, False):
        shared = plan_of()
        attend(plan_of())
    attend(shared)
    with variants.forced(VARIANT, False):
        attend(plan_of())
    assert played.told == 3 * IN_TURNS
    assert played.sums["attend long"] == played.sums["attend short"]


def test_who_wants_it_off_has_it_off_though_there_is_room(played: Played) -> None:
    plan = plan_of()
    with variants.forced(VARIANT, False):
        attend(plan)
    assert played.told == IN_TURNS


def test_without_long_rows_there_is_nothing_beside(played: Played) -> None:
    attend(plan_of(queries_max=1, context_max=9))
    assert played.told == ["here: attend short"]


@pytest.mark.parametrize("fails", ["attend long", "attend short", "combine short"])
def test_a_launch_that_fails_leaves_the_streams_joined(played: Played, fails: str) -> None:
    played.fails = fails
    with pytest.raises(RuntimeError, match="cannot be launched"):
        attend(plan_of())
    assert played.told[-1] == "here waits for side"


def test_a_cpu_computes_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch)
    attend(plan_of())
    assert played.told == IN_TURNS
    assert not played.made
