"""`python -m kaiten.part MODULE ARGUMENTS…`: a part, or a tool of one, as a command of its user."""

import runpy
import sys

from kaiten import cli


def main() -> None:
    """Never returns."""
    module = sys.argv.pop(1)
    cli.to_its_end(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True))


if __name__ == "__main__":
    main()
