"""What a process must settle before torch is loaded into it: how its compute threads wait.

OpenMP's threads spin between the operators of a step, by default for milliseconds. On a machine
that the worker shares with gateway, scheduler and store that takes the cores from the very
processes it waits for, and with more ready threads than cores a step can take many times longer.
About a hundred microseconds bridge the gap between two operators; whoever waits longer sleeps.
"""

import os
from collections.abc import MutableMapping
from typing import Final

_DEFAULTS: Final = {
    # Of libgomp, which the torch wheels bring: turns of its waiting loop.
    "GOMP_SPINCOUNT": "5000",
    # Of LLVM's and Intel's runtime, in other builds of torch: milliseconds.
    "KMP_BLOCKTIME": "0",
    # numpy only moves small columns about; its matrix library needs no threads of its own.
    "OPENBLAS_NUM_THREADS": "1",
}


def prepare(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set what the operator has not set. Without effect once torch is imported."""
    if "OMP_WAIT_POLICY" in environ:
        return
    for name, value in _DEFAULTS.items():
        environ.setdefault(name, value)
