"""Which of these chat templates the gateway renders as transformers does, in every conversation of
tests/parity/template_cases.py.

python -m tools.compare_templates FILE...
"""

import argparse
import sys
from pathlib import Path

from tests.parity.template_cases import Outcome, agree, oracle, ours, renderings

# Characters around the first that differs.
BEFORE, AFTER = 40, 80


def main() -> int:
    """1 if any differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--differences", type=int, default=1, help="shown of each template")
    arguments = parser.parse_args()
    names = [name for name, *_ in renderings()]
    sources = [path.read_text() for path in arguments.files]
    equal = 0
    for path, source, theirs in zip(arguments.files, sources, oracle(sources), strict=True):
        rows = zip(names, ours(source), theirs, strict=True)
        differing = [row for row in rows if not agree(*row[1:])]
        equal += not differing
        if differing:
            print(f"{path}: {len(differing)} of {len(names)} renderings differ")
        for name, own, its in differing[: arguments.differences]:
            print(f"  {name}\n    ours   {shown(own, its)}\n    theirs {shown(its, own)}")
    print(f"{equal} of {len(sources)} templates agree in all {len(names)} renderings")
    return int(equal < len(sources))


def shown(outcome: Outcome, other: Outcome) -> str:
    """Where it begins to differ."""
    pairs = zip(outcome[1], other[1], strict=False)
    at = next((at for at, (one, two) in enumerate(pairs) if one != two), 0)
    return f"{outcome[0]}: {outcome[1][max(0, at - BEFORE) : at + AFTER]!r}"


if __name__ == "__main__":
    sys.exit(main())
