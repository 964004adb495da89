"""What was found, as a page of tables."""

from collections.abc import Sequence
from typing import Any, Final

from benchmarks.gpu.expected import compared

# Of everything said, in this order.
_COLUMNS_FIRST: Final = ("what", "shape", "rows", "context")


def rendered(found: dict[str, Any]) -> str:
    """Markdown: the machine, how the parts went, what was expected, a table per kind of figure."""
    lines = [
        f"# {found['device']}",
        "",
        f"commit {found['commit']}, {found['day']}, {found['seconds']} s, "
        + ", ".join(f"{name} {version}" for name, version in found["versions"].items()),
        "",
        *table([{k: v for k, v in part.items() if k != "log"} for part in found["parts"]]),
    ]
    if beside := compared(found["rows"]):
        lines += ["", "## Beside what was expected", "", *table(beside)]
    tables: dict[str, list[dict[str, Any]]] = {}
    for row in found["rows"]:
        figures = {key: value for key, value in row.items() if key != "table"}
        tables.setdefault(row["table"], []).append(figures)
    for name, rows in tables.items():
        lines += ["", f"## {name}", "", *table(rows)]
    return "\n".join(lines) + "\n"


def logs(found: dict[str, Any]) -> str:
    """Of the parts that did not end well."""
    return "".join(
        f"\n## log of {part['part']}\n\n```\n{part['log'].strip()}\n```\n"
        for part in found["parts"]
        if part.get("log")
    )


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    columns.sort(key=lambda name: _COLUMNS_FIRST.index(name) if name in _COLUMNS_FIRST else 99)
    body = [[_cell(row.get(column)) for column in columns] for row in rows]
    return [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *body)]


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")
