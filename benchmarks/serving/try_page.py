"""How soon `/` is there: first paint in a real Chromium, and what it had to load.

    python -m benchmarks.serving.try_page [--loads 10] [--save]

The shipped model behind a whole stack; each load is one of a new profile, with nothing cached.
`paint_ms` is the browser's own first-contentful-paint, from the click to the first words, on this
machine in this hour; `main_thread_ms` is processor time until the page says `ready`, which others
hardly touch. Bytes are as they come over the wire.
"""

import argparse
import asyncio
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.recording import record
from benchmarks.serving.stack import serving
from tests.support.tab import tab

READY = "document.getElementById('state').textContent === 'ready'"
PAINTED = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"
LOADED = (
    "[...performance.getEntriesByType('navigation'), ...performance.getEntriesByType('resource')]"
    ".map((one) => [new URL(one.name).pathname, one.transferSize])"
)


async def load(profile: Path, url: str) -> dict[str, object]:
    async with tab(profile, url) as page:
        await page.until(READY)
        await page.until(f"{PAINTED} !== null")
        loaded = await page.look(LOADED)
        figures = await page.figures()
        assert not page.troubles, page.troubles
        return {
            "paint_ms": await page.look(PAINTED),
            "main_thread_ms": 1000 * figures["TaskDuration"],
            "bytes": sum(size for _, size in loaded),
            "paths": [path for path, _ in loaded],
        }


async def measured(url: str, loads: int) -> dict[str, object]:
    with TemporaryDirectory() as folder:
        found = [await load(Path(folder) / str(number), url) for number in range(loads)]
    paints = sorted(float(str(one["paint_ms"])) for one in found)
    return {
        "first_paint_p50_ms": round(median(paints)),
        "first_paint_max_ms": round(paints[-1]),
        "main_thread_ms": round(median(float(str(one["main_thread_ms"])) for one in found)),
        "bytes": max(int(str(one["bytes"])) for one in found),
        "paths": found[-1]["paths"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--loads", type=int, default=10)
    parser.add_argument("--save", action="store_true")
    asked = parser.parse_args()
    with serving() as stack:
        figures = asyncio.run(measured(f"{stack.http}/", asked.loads))
    record("try_page", {"loads": asked.loads} | figures, save=asked.save)


if __name__ == "__main__":
    main()
