"""Whether `/dashboard` keeps up: a full batch at a steady pace, drawn by a real Chromium.

    python -m benchmarks.serving.dashboard_page [--slots 64] [--kv-blocks 4096] [--step-ms 20]

The worker's steps take so long and its model is a function; scheduler, gateway and browser are as
ever, and draw without a GPU. `main_thread_share` and `frame_ms` are processor time of the page's
main thread, which a busy machine hardly touches; the frames that came are of this machine in this
hour. `behind_ms` is the age of the newest iteration that is drawn, the interval of the watch
included.
"""

import argparse
import asyncio
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.recording import record
from kaiten.client import Client
from tests.support.processes import MOCK_WORKER
from tests.support.tab import Tab, tab
from tests.support.whole_stack import WholeStack

SECONDS = 10.0
SAMPLE_S = 0.1
BEHIND = "Date.now() - (track()?.column(track().count - 1)?.at ?? 0)"
COUNTS = "[view.frames, track().count, live.lost]"
PAINTED = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"


def crowd(client: Client, slots: int) -> list[str]:
    """Ragged, and enough of them that nobody's slot stays empty."""
    return [
        client.submit("The chef", max_tokens=100 + 211 * i % 700, ignore_eos=True)
        for i in range(4 * slots)
    ]


async def watched(page: Tab, slots: int) -> dict[str, object]:
    await page.size(1280, 720)
    await page.until(
        f"track()?.count > 50 && {slots} === [...live.core.sequences.values()]"
        ".filter((one) => one.place?.state === 'running').length"
    )
    painted_ms = await page.look(PAINTED)
    before, (frames, steps, lost) = await page.figures(), await page.look(COUNTS)
    began, behind = time.perf_counter(), []
    while time.perf_counter() - began < SECONDS:
        behind.append(float(await page.look(BEHIND)))
        await asyncio.sleep(SAMPLE_S)
    after, counts = await page.figures(), await page.look(COUNTS)
    wall_s = time.perf_counter() - began
    busy_s, drawn = after["TaskDuration"] - before["TaskDuration"], counts[0] - frames
    return {
        "first_paint_ms": painted_ms and round(painted_ms),
        "steps_per_s": round((counts[1] - steps) / wall_s, 1),
        "steps_lost": counts[2] - lost,
        "frames_per_s": round(drawn / wall_s, 1),
        "frame_ms": round(1000 * busy_s / drawn, 2),
        "main_thread_share": round(busy_s / wall_s, 3),
        "behind_ms": round(median(behind)),
        "heap_mb": round(after["JSHeapUsedSize"] / 1e6, 1),
    }


async def measure(folder: Path, stack: WholeStack, slots: int) -> dict[str, object]:
    async with tab(folder / "profile", f"{stack.door.http}/dashboard") as page:
        figures = await watched(page, slots)
        assert not page.troubles, page.troubles
        return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--kv-blocks", type=int, default=4096)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--save", action="store_true")
    chosen = parser.parse_args()
    flags = {"slots": chosen.slots, "kv_blocks": chosen.kv_blocks, "step_ms": chosen.step_ms}
    with TemporaryDirectory() as name:
        folder = Path(name)
        stack = WholeStack(folder, worker_flags=flags, worker_module=MOCK_WORKER)
        with stack, Client(stack.door.grpc) as client:
            ids = crowd(client, chosen.slots)
            figures = asyncio.run(measure(folder, stack, chosen.slots))
            for id in ids:
                client.cancel(id)
    record("dashboard_page", flags | figures, save=chosen.save)


if __name__ == "__main__":
    main()
