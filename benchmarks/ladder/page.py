"""docs/continuous-batching.md: tables between their markers, pictures that come out the same."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.recording import ROOT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE: Final = ROOT / "docs" / "continuous-batching.md"
IMAGES: Final = ROOT / "docs" / "images"


def write_table(name: str, table: str, page: Path = PAGE) -> None:
    """Replace what is between `<!-- NAME:begin -->` and `<!-- NAME:end -->`."""
    markers = re.compile(rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)", re.DOTALL)
    text = page.read_text(encoding="utf-8")
    written, count = markers.subn(lambda match: f"{match[1]}{table}\n{match[2]}", text)
    assert count == 1, f"{page.name} has lost the markers of {name}"
    page.write_text(written, encoding="utf-8")


def subplots(rows: int, columns: int, **options: Any) -> Any:
    """Matplotlib's figure and axes, for a picture that is the same whenever it is drawn."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "kaiten"
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, layout="constrained", **options)


def save(figure: "Figure", path: Path) -> None:
    """Without frames above and right of the plots."""
    for axis in figure.axes:
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
