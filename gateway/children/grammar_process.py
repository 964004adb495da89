"""Compile grammars in child processes: what a client writes may take any time and memory."""

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from gateway.children.pool import ChildLimits, ChildPool, Work
from gateway.children.tenant_slots import TenantSlots
from kaiten.v1.common_pb2 import StructuredOutputs

WORK: Final = Work(
    module="gateway.children.grammar_child",
    field="sampling.structured_outputs",
    subject="the grammar",
)
# Of those that were let in; clients ask by one schema again and again.
KEPT: Final = 256


class GrammarProcess(ChildPool):
    """For one model. Children start with the first grammar that is asked for."""

    def __init__(self, tokenizer: Path, vocab_size: int, limits: ChildLimits | None = None) -> None:
        setup = {"tokenizer": str(tokenizer), "vocab_size": vocab_size}
        limits = limits or ChildLimits()
        super().__init__(WORK, setup, limits)
        self._slots = TenantSlots(limits.children)
        self._kept: OrderedDict[bytes, str] = OrderedDict()

    async def grammar(self, wanted: StructuredOutputs, tenant: str) -> str:
        """As workers read it. A tenant's new ones wait for each other before others' do.

        InvalidRequest: it is none, or too large to compile.
        """
        key = wanted.SerializeToString(deterministic=True)
        if key not in self._kept:
            async with self._slots.place(tenant):
                said = await self.ask(_question(wanted))
            self._kept[key] = said["grammar"]
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    async def begins(
        self,
        grammar: str,
        allowed: Sequence[int],
        forbidden: Sequence[int],
        ends: Sequence[int],
        *,
        tenant: str,
    ) -> bool:
        """Whether there is a first token for an output of a compiled grammar. `allowed`: those
        there are; empty: all. `ends`: those that end an output.
        """
        async with self._slots.place(tenant):
            said = await self.ask(
                {
                    "grammar": grammar,
                    "allowed": [*allowed],
                    "forbidden": [*forbidden],
                    "ends": [*ends],
                }
            )
        return bool(said["begins"])


def _question(wanted: StructuredOutputs) -> dict[str, Any]:
    form = wanted.WhichOneof("constraint")
    assert form is not None, "checked"
    value = list(wanted.choice.texts) if form == "choice" else getattr(wanted, form)
    return {"form": form, "value": value, "is_tight": wanted.disable_any_whitespace}
