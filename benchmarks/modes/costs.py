"""What a step of a worker takes, in nanoseconds: fitted to steps that were measured.

`CPU` is the 128M-parameter shape in bf16 on two cores, by the ten cases of commit 3c811ec+ in
results/step_profile.jsonl, which a test holds it to. `GPU` is not measured: the floors of an 8B
model in bf16 at an H200's measured bandwidth and matrix rate, where a row that decodes costs little
beside the weights. What holds on one may not hold on the other.
"""

from dataclasses import dataclass
from typing import Final

from scheduler_svc.core.types import WorkerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Of a step: once, per row that decodes, per token of a prompt, per KV token that a row which
    decodes reads, and per 1000 pairs of a prompt's token and one it attends to.
    """

    step_ns: int
    row_ns: int
    prompt_token_ns: int
    kv_read_ns: int
    kilo_pairs_ns: int
    # One way between scheduler and worker.
    latency_ns: int
    # Of the worker: slots, tokens of a step, KV blocks of 16 tokens, and what `--mixed-step-ms` is
    # for it by default.
    slots: int
    step_tokens: int
    blocks: int
    mixed_step_ns: int

    def step(self, rows: int, contexts: int, chunks: list[tuple[int, int]]) -> int:
        """Rows that decode, all KV tokens that they read, and by chunk its tokens and those before
        it. Where nothing is computed, nothing.
        """
        if not rows and not chunks:
            return 0
        tokens = sum(count for count, _ in chunks)
        pairs = sum(count * before + count * count // 2 for count, before in chunks)
        return (
            self.step_ns
            + rows * self.row_ns
            + contexts * self.kv_read_ns
            + tokens * self.prompt_token_ns
            + pairs * self.kilo_pairs_ns // 1000
        )

    def alone(self, prompt_tokens: int, output_tokens: int) -> int:
        """A request's part in a worker that is never idle: no step is begun for it alone."""
        reads = output_tokens * (prompt_tokens + output_tokens // 2)
        return self.step(output_tokens, reads, [(prompt_tokens, 0)]) - self.step_ns

    def mixed_tokens(self, slots: int, limit_ns: int) -> int:
        """As the worker measures it when it starts (`gpu_worker.runner.warm_up.mixed_tokens`)."""
        left_ns = limit_ns - self.step_ns - slots * self.row_ns
        return min(self.step_tokens, max(2 * slots, slots + left_ns // self.prompt_token_ns))

    def spec(
        self, *, slots: int | None = None, blocks: int | None = None, mixed_ns: int | None = None
    ) -> WorkerSpec:
        """The worker, or one like it."""
        slots = slots or self.slots
        return WorkerSpec(
            fingerprint="f",
            block_size=16,
            block_count=blocks or self.blocks,
            slots_max=slots,
            step_tokens_max=self.step_tokens,
            mixed_tokens_max=self.mixed_tokens(slots, mixed_ns or self.mixed_step_ns),
            vocab_size=32000,
        )


CPU: Final = Costs(
    step_ns=3_600_000,
    row_ns=634_000,
    prompt_token_ns=477_000,
    kv_read_ns=490,
    kilo_pairs_ns=89_000,
    latency_ns=290_000,
    slots=64,
    step_tokens=512,
    blocks=3000,
    mixed_step_ns=130_000_000,
)
GPU: Final = Costs(
    step_ns=3_500_000,
    row_ns=20_000,
    prompt_token_ns=20_000,
    kv_read_ns=29,
    kilo_pairs_ns=700,
    latency_ns=150_000,
    slots=256,
    step_tokens=8192,
    blocks=20_000,
    mixed_step_ns=130_000_000,
)
DEVICES: Final = {"cpu": CPU, "gpu": GPU}
