"""JSON Schema's own test suite beside what is let in: which keywords, and are they kept to.

    git clone https://github.com/json-schema-org/JSON-Schema-Test-Suite
    python -m benchmarks.structured.keywords JSON-Schema-Test-Suite [--list] [--save]

A file of tests/draft2020-12 is about one keyword. Each of its schemas is compiled as the gateway
does it; of those let in, the grammar reads the suite's instances, written without white space.

let_in     schemas of so many, and `refused`: the reasons of the others, counted
named      of those refused, how many reasons name a keyword, a format or a type of the schema
valid      valid instances that the grammar has, of so many
order      others that it has with properties in another order: it keeps that of the schema
narrow     others that it never writes: 1.0 for an integer, extra properties, values of other types
invalid    invalid instances that it does not have, of so many; `loose` names the others
never      refused, and rightly, as nothing could be valid
keyword    counts as let in where at least half of its file's schemas are, or are never valid
"""

import argparse
import itertools
import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from benchmarks import recording
from gateway.children.child import Refused
from gateway.children.grammar_child import Compiler
from service_kit.grammars import GrammarTokenizer
from tests.support.tokenizers import byte_level_bpe

DRAFT: Final = Path("tests") / "draft2020-12"
ORDERS_MAX: Final = 500
SHARE: Final = 0.5
# About documents and identifiers, and not about what an instance may be.
NOT_KEYWORDS: Final = ("anchor", "vocabulary", "infinite-loop-detection", "refRemote")


class Reader:
    """Compiles as the gateway, and reads whole texts."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        byte_level_bpe().save(str(path))
        vocab_size = byte_level_bpe().get_vocab_size()
        self._compiler = Compiler({"tokenizer": str(path), "vocab_size": vocab_size})
        self._tokenizer = GrammarTokenizer(path, vocab_size)

    def grammar(self, schema: Any) -> str:
        """Refused."""
        question = {"form": "json", "value": json.dumps(schema), "is_tight": True}
        return str(self._compiler(question)["grammar"])

    def has(self, grammar: str, value: Any) -> bool:
        text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
        tokens = self._tokenizer.tokens.tokenize_str(text)
        matcher = self._tokenizer.compiled(grammar)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def orders(value: Any) -> Iterator[Any]:
    """The same value with its properties, at every level, in every order."""
    if isinstance(value, list):
        yield from map(list, itertools.product(*(list(_few(each)) for each in value)))
    elif isinstance(value, dict):
        for names in itertools.permutations(value):
            inner = (list(_few(value[name])) for name in names)
            yield from (dict(zip(names, each, strict=True)) for each in itertools.product(*inner))
    else:
        yield value


def _few(value: Any) -> Iterator[Any]:
    return itertools.islice(orders(value), ORDERS_MAX)


def judge(reader: Reader, group: dict[str, Any], row: dict[str, Any]) -> None:
    """One schema of the suite and its instances."""
    row["schemas"] += 1
    try:
        grammar = reader.grammar(group["schema"])
    except Refused as error:
        reason = str(error).removeprefix("cannot be compiled: ")
        row["refused"][_kind_of(reason)] += 1
        row["named"] += _names_part(reason, group["schema"])
        row["never"] += "Unsatisfiable" in reason and not any(t["valid"] for t in group["tests"])
        return
    row["let_in"] += 1
    for test in group["tests"]:
        is_had = reader.has(grammar, test["data"])
        if not test["valid"]:
            row["invalid"] += 1
            row["kept_out"] += not is_had
            if is_had:
                row["loose"].append(f"{group['description']}: {test['description']}")
            continue
        row["valid"] += 1
        if is_had:
            row["had"] += 1
        elif any(reader.has(grammar, each) for each in _few(test["data"])):
            row["order"] += 1
        else:
            row["narrow"].append(f"{group['description']}: {test['description']}")


def _kind_of(reason: str) -> str:
    """Without what only this schema says."""
    return re.sub(r"(?<=[:'\"]) ?https?:\S+|#/\S*", "…", reason)[:90]


def _names_part(reason: str, schema: Any) -> bool:
    parts = set(re.findall(r'"([^"]+)"', json.dumps(schema)))
    return any(part in reason for part in parts) or "false" in reason


def keyword_row(reader: Reader, path: Path) -> dict[str, Any]:
    row: dict[str, Any] = {"keyword": path.stem, "refused": Counter(), "loose": [], "narrow": []}
    row |= dict.fromkeys(
        ("schemas", "let_in", "never", "named", "valid", "had", "order", "invalid", "kept_out"), 0
    )
    for group in json.loads(path.read_text(encoding="utf-8")):
        judge(reader, group, row)
    return row


def total(rows: list[dict[str, Any]], name: str) -> int:
    return sum(row[name] for row in rows)


def is_let_in(row: dict[str, Any]) -> bool:
    return bool(row["let_in"] + row["never"] >= SHARE * row["schemas"])


def figures_of(rows: list[dict[str, Any]], version: str) -> dict[str, object]:
    keywords = [row for row in rows if row["keyword"] not in NOT_KEYWORDS]
    let_in = [row["keyword"] for row in keywords if is_let_in(row)]
    refused = total(rows, "schemas") - total(rows, "let_in")
    return {
        "suite": version,
        "files": len(rows),
        "schemas": total(rows, "schemas"),
        "let_in": total(rows, "let_in"),
        "never": total(rows, "never"),
        "refused_by_name": f"{total(rows, 'named')} of {refused}",
        "valid": f"{total(rows, 'had')} of {total(rows, 'valid')}",
        "order": total(rows, "order"),
        "invalid": f"{total(rows, 'kept_out')} of {total(rows, 'invalid')}",
        "keywords_let_in": f"{len(let_in)} of {len(keywords)}",
        "share": round(len(let_in) / len(keywords), 3),
        "keywords_refused": [row["keyword"] for row in keywords if not is_let_in(row)],
        "table": {
            row["keyword"]: {
                "let_in": f"{row['let_in']}/{row['schemas']}",
                "never": row["never"],
                "valid": f"{row['had']}/{row['valid']}",
                "order": row["order"],
                "invalid": f"{row['kept_out']}/{row['invalid']}",
                "refused": dict(row["refused"]),
                "loose": row["loose"],
            }
            for row in rows
        },
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    print(
        "| keyword | schemas let in | never valid | valid | in another order | invalid kept out |"
    )
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| `{row['keyword']}` | {row['let_in']} of {row['schemas']} | {row['never']} "
            f"| {row['had']} of {row['valid']} | {row['order']} "
            f"| {row['kept_out']} of {row['invalid']} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite", type=Path)
    parser.add_argument("--version", default="", help="the commit of the suite, for the record")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--save", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        reader = Reader(Path(folder))
        rows = [keyword_row(reader, path) for path in sorted((asked.suite / DRAFT).glob("*.json"))]
    print_table(rows)
    if asked.list:
        for row in rows:
            for kind in ("refused", "loose", "narrow"):
                for line in row[kind]:
                    print(f"{row['keyword']:24} {kind:8} {line}")
    recording.record("structured_keywords", figures_of(rows, asked.version), save=asked.save)


if __name__ == "__main__":
    main()
