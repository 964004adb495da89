"""The terminal that commands write to."""

import sys

from rich.console import Console

COLUMNS_WHEN_PIPED = 100


def console(*, stderr: bool = True) -> Console:
    """A console that does not wrap at 80 columns in a log file."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else COLUMNS_WHEN_PIPED)
