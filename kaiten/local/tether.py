"""Run a command that dies when its parent does: `tether.py PARENT_PID PROGRAM ARGS…`.

Started as a script with `-I -S`, so that it costs milliseconds and imports nothing of ours. The
wish to die with the parent survives `exec`. Linux only; elsewhere a killed supervisor leaves its
children behind.
"""

import ctypes
import os
import signal
import sys
from typing import Final

PR_SET_PDEATHSIG: Final = 1


def main(argv: list[str]) -> None:
    """Never returns: the process becomes the command."""
    parent, *command = argv
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        # The parent may have died before the wish was made.
        if os.getppid() != int(parent):
            sys.exit("the supervisor is gone")
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
