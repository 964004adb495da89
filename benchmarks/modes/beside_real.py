"""The model beside the real thing: the same crowd through store, scheduler, wire and a mock worker
whose steps take what `Costs` says.

    python -m benchmarks.modes.beside_real [--save]

Streams decode while prompts come. By mix, as modelled and as it was: gaps of the streams and first
tokens of the prompts, in ms. What is compared is the ranking, and roughly the sizes: the real one
runs on a machine that does other things too.
"""

import argparse
import asyncio
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

from benchmarks.modes.claims import READER, STREAM
from benchmarks.modes.costs import CPU
from benchmarks.modes.figures import MS, gaps_ns, percentile, ttfts_ns
from benchmarks.modes.laws import numbered
from benchmarks.modes.model import Run
from benchmarks.modes.ways import configured
from benchmarks.recording import record
from tests.support.answers import Answer
from tests.support.cluster import Cluster

STREAMS, STREAM_TOKENS, SLOTS = 24, 300, 28
READER_TOKENS: Final = 450
READERS_AT_S: Final = tuple(2.0 + 0.7 * index for index in range(6))
# What the mock worker knows nothing of costs nothing.
COSTS: Final = replace(CPU, kv_read_ns=0, kilo_pairs_ns=0)
# By mix, tokens of a step: `chunked` cuts prompts to what is left beside the streams.
STEP_TOKENS: Final = {"chunked": 56, "merged_prefill": 512, "prefill_first": 512}


def figures(gaps: list[int], ttfts: list[int]) -> dict[str, float]:
    """In ms."""
    return {
        "gap_p50": round(percentile(gaps, 500) / MS, 1),
        "gap_p99": round(percentile(gaps, 990) / MS, 1),
        "ttft_p50": round(percentile(ttfts, 500) / MS, 1),
    }


def modelled(mix: str) -> dict[str, float]:
    """In virtual time."""
    jobs = numbered(
        [(0, (i, *range(8)), STREAM_TOKENS, STREAM_TOKENS, STREAM) for i in range(STREAMS)]
        + [
            (int(at_s * 1e9), (100 + i, *range(READER_TOKENS - 1)), 2, 2, READER)
            for i, at_s in enumerate(READERS_AT_S)
        ]
    )
    spec = replace(COSTS.spec(slots=SLOTS), step_tokens_max=STEP_TOKENS[mix], mixed_tokens_max=None)
    run = Run(COSTS, spec, configured({"mix": mix}), jobs).play()
    since_ns = int(READERS_AT_S[0] * 1e9)
    gaps = gaps_ns(run, lambda one: one.tenant == STREAM, since_ns)
    return figures(gaps, ttfts_ns(run, lambda one: one.tenant == READER))


async def real(mix: str, folder: Path) -> dict[str, float]:
    """Through processes."""
    worker = {
        "slots": SLOTS,
        "kv_blocks": 2048,
        "step_tokens": STEP_TOKENS[mix],
        "step_ms": COSTS.step_ns / MS,
        "token_us": COSTS.prompt_token_ns / 1000,
        "row_us": (COSTS.row_ns - COSTS.prompt_token_ns) / 1000,
    }
    async with Cluster(folder, scheduler_flags={"mix": mix}, worker_flags=worker) as cluster:
        began_s = time.monotonic()
        streams = await cluster.submit_many(STREAMS, prompt_tokens=9, max_tokens=STREAM_TOKENS)
        readers: list[tuple[float, Answer]] = []
        for at_s in READERS_AT_S:
            await asyncio.sleep(max(0.0, began_s + at_s - time.monotonic()))
            asked_s = time.monotonic()
            reader = await cluster.submit(prompt_tokens=READER_TOKENS, max_tokens=2)
            readers.append((asked_s, reader))
        await cluster.all_done()
    since_s = began_s + READERS_AT_S[0]
    gaps = [
        int((after_s - before_s) * 1e9)
        for stream in streams
        for before_s, after_s in zip(stream.heard_s, stream.heard_s[1:], strict=False)
        if before_s >= since_s
    ]
    return figures(gaps, [int((one.heard_s[0] - at_s) * 1e9) for at_s, one in readers])


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", action="store_true")
    asked = parser.parse_args()
    found = {}
    for mix in STEP_TOKENS:
        with tempfile.TemporaryDirectory(prefix="kaiten-modes-") as folder:
            found[mix] = {"model": modelled(mix), "real": asyncio.run(real(mix, Path(folder)))}
        print(mix, found[mix], flush=True)
    record("modes_real", {"mixes": found}, save=asked.save)


if __name__ == "__main__":
    main()
