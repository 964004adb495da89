"""Is each line of a batch answered exactly once, whatever dies?

    python -m benchmarks.faults.batch_deaths [--lines 1000] [--save]

The story of `tests/integration/test_batches_survive.py`, of more lines: `kill -9` of the worker and
both gateways under the batch, then of each gateway, the scheduler and the store in turn, each
started again. It fails unless every line has one answer, in order, none failed, with the text of an
undisturbed run.
"""

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from typing import Final

from benchmarks.recording import record
from tests.integration.test_batches_survive import answered_once

# Of a line, on a machine that does much else.
SECONDS: Final = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--save", action="store_true", help="append to benchmarks/results")
    chosen = parser.parse_args()
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kaiten-batch-") as folder:
        within_s = SECONDS * chosen.lines
        asyncio.run(answered_once(Path(folder), chosen.lines, timeout_s=within_s))
    seconds = round(time.monotonic() - began_s, 1)
    figures: dict[str, object] = {"lines": chosen.lines, "answered_once": chosen.lines}
    record("batch_deaths", figures | {"seconds": seconds}, save=chosen.save)


if __name__ == "__main__":
    main()
