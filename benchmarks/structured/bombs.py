"""Hostile schemas, regexes and grammars: refused or compiled soon, and no mask holds up others.

    python -m benchmarks.structured.bombs [--steps 200] [--save]

Each goes through a gateway's own child process. What is let in is walked by a worker's tokenizer:
twice with tokens drawn from each mask, and once letter by letter, which is more to read per text.

answer_ms  until the child has answered, or was replaced; its start is not counted
peak_mb    the child's memory at most, so far: it has compiled those before
mask_ms    the slowest token and its mask, in CPU time of their thread
mean_ms    of all of them in that walk
ends       by its time: masks take longer than MASK_S_MEAN and, beyond it, MASK_CREDIT_S in all
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks import recording
from benchmarks.structured.tokenizer import learnt_tokenizer
from gateway.children.grammar_process import GrammarProcess
from kaiten.v1.common_pb2 import StructuredOutputs
from service_kit.errors import InvalidRequest
from service_kit.grammars import MASK_CREDIT_S, MASK_S_MEAN, GrammarTokenizer

VOCAB: Final = 49152


def _nested(levels: int, inner: Callable[[Any], Any]) -> str:
    told: Any = {"type": "null"}
    for _ in range(levels):
        told = inner(told)
    return json.dumps(told)


def _references(levels: int, form: str) -> str:
    """Each definition is the next one twice."""
    told: dict[str, Any] = {f"d{levels}": {"type": "integer"}}
    for level in range(levels):
        one = {"$ref": f"#/$defs/d{level + 1}"}
        told[f"d{level}"] = {
            "anyOf": {"anyOf": [one, {"type": "array", "items": one}]},
            "allOf": {"allOf": [one, one]},
            "object": {
                "type": "object",
                "properties": {"a": one, "b": one},
                "required": ["a", "b"],
                "additionalProperties": False,
            },
        }[form]
    return json.dumps({"$ref": "#/$defs/d0", "$defs": told})


def _optional(count: int, *, is_open: bool) -> str:
    names = {f"k{index}": {"type": "string"} for index in range(count)}
    return json.dumps({"type": "object", "properties": names, "additionalProperties": is_open})


JSON: Final = {
    "arrays 60 deep": _nested(60, lambda one: {"type": "array", "items": one}),
    "arrays 900 deep": _nested(900, lambda one: {"type": "array", "items": one}),
    "objects 100 deep": _nested(100, lambda one: {"type": "object", "properties": {"a": one}}),
    "brackets 30,000 deep": "[" * 30_000,
    "anyOf 12 deep": _nested(12, lambda one: {"anyOf": [one, {"type": "array", "items": one}]}),
    "enum of 5,000": json.dumps({"enum": [f"v{index}" for index in range(5000)]}),
    "enum of long texts": json.dumps({"enum": ["x" * 6000 + str(index) for index in range(10)]}),
    "enum of one text 60,000 long": json.dumps({"enum": ["x" * 60_000]}),
    "references twice, anyOf": _references(40, "anyOf"),
    "references twice, allOf": _references(24, "allOf"),
    "references twice, objects": _references(24, "object"),
    "reference to itself": '{"$ref": "#"}',
    "allOf of itself": '{"allOf": [{"$ref": "#"}]}',
    "references in a ring": json.dumps(
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    ),
    "1,000 optional properties": _optional(1000, is_open=False),
    "1,000 optional properties, open": _optional(1000, is_open=True),
    "300 optional properties, open": _optional(300, is_open=True),
    "1,000 required properties": json.dumps(
        {
            "type": "object",
            "properties": {f"k{index}": {"type": "integer"} for index in range(1000)},
            "required": [f"k{index}" for index in range(1000)],
        }
    ),
    "minItems 100,000": '{"type": "array", "items": {"type": "integer"}, "minItems": 100000}',
    "maxItems 10^9": '{"type": "array", "items": {"type": "integer"}, "maxItems": 1000000000}',
    "maxLength 10^9": '{"type": "string", "maxLength": 1000000000}',
    "minLength 5,000": '{"type": "string", "minLength": 5000, "maxLength": 10000}',
    "minProperties 1,000": '{"type": "object", "minProperties": 1000}',
    "nested counted items": json.dumps(
        {"type": "array", "maxItems": 300, "items": {"type": "array", "maxItems": 300,
         "items": {"type": "array", "maxItems": 300, "items": {"type": "integer"}}}}
    ),
    "multipleOf of 15 digits": '{"type": "integer", "multipleOf": 123456789012345}',
    "multipleOf 9,973": '{"type": "integer", "multipleOf": 9973}',
    "bounds of 300 digits": json.dumps({"type": "integer", "minimum": 10**300}),
    "pattern (a|a)*": json.dumps({"type": "string", "pattern": "^(a|a)*$"}),
    "pattern nested counts": json.dumps(
        {"type": "string", "pattern": "^(([a-z]{1,50}){1,50}){1,50}$"}
    ),
    "patterns that intersect": json.dumps(
        {"allOf": [{"type": "string", "pattern": f"[{a}-z].{{{20 + index}}}$"}
                   for index, a in enumerate("abcdefgh")]}
    ),
    "oneOf of 100 consts": json.dumps({"oneOf": [{"const": index} for index in range(100)]}),
    "anyOf of 100 open objects": json.dumps(
        {"anyOf": [{"type": "object", "properties": {f"k{index}": {"type": "string"}}}
                   for index in range(100)]}
    ),
    "anyOf of 150 open objects": json.dumps(
        {"anyOf": [{"type": "object", "properties": {f"k{index}": {"type": "string"}}}
                   for index in range(150)]}
    ),
    "anyOf of 30 arrays, twice": _nested(
        2, lambda one: {"anyOf": [one, *[{"type": "array", "items": one}] * 30]}
    ),
    "patternProperties of 60": json.dumps(
        {"type": "object", "patternProperties": {f"^a{index}b": {} for index in range(60)}}
    ),
    "if in if": _nested(12, lambda one: {"if": one, "then": {"type": "null"}}),
    "oneOf in oneOf": _nested(60, lambda one: {"oneOf": [one, {"type": "null"}, {"minLength": 3}]}),
    "oneOf of enums": json.dumps(
        {"oneOf": [{"enum": [f"v{a}{b}" for b in range(100)]} for a in range(8)]}
    ),
    "not of 500 texts": json.dumps(
        {"type": "string", "not": {"enum": [f"v {index}" for index in range(500)]}}
    ),
    "1,000 dependents": json.dumps(
        {"type": "object", "dependentRequired": {f"k{i}": [f"k{i + 1}"] for i in range(1000)}}
    ),
}  # fmt: skip
REGEX: Final = {
    "(a+)+": "(a+)+$",
    "(.*)* nested": "((((.*)*)*)*)*x",
    "counts nested": "((a{1,100}){1,100}){1,100}",
    "counts nested, unicode": r"((\w{1,40} ){1,40}\n){1,40}",
    "[ab]*a[ab]{25}": "[ab]*a[ab]{25}",
    "[ab]*a[ab]{12}": "[ab]*a[ab]{12}",
    ".*a.{200}": "(?s:.*)a(?s:.{200})",
    "any{10000}": ".{10000}",
    "any{1,2000}": ".{1,2000}",
    "alternatives": "|".join(f"word{index}" for index in range(6000)),
    "words with endings": "(" + "|".join(f"w{index}" for index in range(500)) + "){1,200}",
    "optional{2000}": "(a?){2000}a{2000}",
    "brackets 5,000 deep": "(" * 5000 + "a" + ")" * 5000,
    "classes": r"(\p{L}|\p{N}|\p{P}){500}",
    "dot-star chain": ".*".join("abcdefghijklmnopqrstuvwxyz"),
    "dot-star chain of alternatives": "|".join(
        f"(.*{a}.*{b})" for a in "abcdefgh" for b in "stuvwxyz"
    ),
}  # fmt: skip
GRAMMAR: Final = {
    "empty rules": "start: a*\na: b*\nb: c*\nc: |\n",
    "left recursion": "start: start start | /a/\n",
    "ambiguous sums": "start: e\ne: e e e | e e | /a/ | \n",
    "doubling": "start: r0\nr40: /a/\n"
    + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(40)),
    "doubling, ambiguous": "\n".join(
        ["start: r0"] + [f"r{i}: r{i + 1} r{i + 1} | r{i + 1}" for i in range(60)] + ["r60: /a?/"]
    ),
    "counts": "start: (/[a-z]/ (/[0-9]/){0,1000}){0,1000}\n",
    "nested counts, 9 three deep": "start: a{1,9}\na: b{1,9}\nb: c{1,9}\nc: /q/\n",
    "nested counts, 30 twice": "start: a{1,30}\na: b{1,30}\nb: /q/\n",
    "nested counts": "start: a{1,99}\na: b{1,99}\nb: c{1,99}\nc: d{1,99}\nd: /x/\n",
    "3,000 rules": "start: " + " | ".join(f"r{i}" for i in range(3000)) + "\n"
    + "\n".join(f'r{i}: "a{i}" start?' for i in range(3000)),
    "regexes that overlap": "start: " + " | ".join(f"T{i}" for i in range(200)) + "\n"
    + "\n".join(f"T{i}: /[a-z]{{{i + 1},{i + 90}}}[0-9]*/" for i in range(200)),
    "complement": "start: A & ~B\nA: /.*/\nB: /.*(a.{30})/\n",
    "GBNF itself": "root ::= root root | [a-z]\n",
    "GBNF nested": "root ::= a a a a\na ::= b b b b\nb ::= c* c* c* c*\nc ::= [a-z]* [a-z]*\n",
    "GBNF counts": "root ::= ([a-z]{0,500} [0-9]{0,500}){0,500}\n",
    "GBNF without end": "root ::= a\na ::= b\nb ::= a\n",
    "brackets": "start: " + "(" * 3000 + '"a"' + ")" * 3000 + "\n",
}  # fmt: skip
CHOICE: Final = {
    "4,096 choices": [f"choice {index}" for index in range(4096)],
    "choices of 15,000": [chr(97 + index) * 15_000 for index in range(4)],
}


def asked() -> dict[str, StructuredOutputs]:
    bombs = {f"json: {name}": StructuredOutputs(json=text) for name, text in JSON.items()}
    bombs |= {f"regex: {name}": StructuredOutputs(regex=text) for name, text in REGEX.items()}
    bombs |= {f"grammar: {name}": StructuredOutputs(grammar=text) for name, text in GRAMMAR.items()}
    for name, texts in CHOICE.items():
        bombs[f"choice: {name}"] = StructuredOutputs(choice={"texts": texts})
    return bombs


def peak_mb(process: GrammarProcess) -> float:
    """Of the child that runs, if there is one."""
    child = process._children[0].process
    if child is None:
        return 0.0
    status = Path(f"/proc/{child.pid}/status").read_text()
    kilobytes = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
    return round(int(kilobytes) / 1024, 1)


def slowest(
    tokenizer: GrammarTokenizer, grammar: str, steps: int, seed: int | None
) -> tuple[float, float, str]:
    """CPU milliseconds of the slowest mask of a walk, of the mean one, and how it ended.

    `seed` None: the first of the shortest tokens each time.
    """
    draw, took_s = random.Random(seed), [0.0]
    credit_s = MASK_CREDIT_S

    def end(reason: str) -> tuple[float, float, str]:
        return max(took_s) * 1e3, sum(took_s) / len(took_s) * 1e3, reason

    matcher = tokenizer.compiled(grammar).deep_copy()
    mask = np.zeros(tokenizer.mask_words, np.uint32)
    started = time.thread_time()
    for _ in range(steps):
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        took_s.append(time.thread_time() - started)
        credit_s = min(MASK_CREDIT_S, credit_s + MASK_S_MEAN - took_s[-1])
        if matcher.is_error():
            return end("ended by a limit")
        if credit_s < 0:
            return end("ended by its time")
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        bits[tokenizer.end] = 0
        if not len(allowed := np.flatnonzero(bits)):
            return end("complete")
        if seed is None:
            lengths = (len(tokenizer.tokens.decode_bytes([each])) for each in allowed.tolist())
            token_id = int(allowed[min(zip(lengths, range(len(allowed)), strict=True))[1]])
        else:
            token_id = int(draw.choice(allowed.tolist()))
        started = time.thread_time()
        matcher.consume_token(token_id)
    return end("goes on")


async def measure(steps: int) -> dict[str, object]:
    told: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        learnt_tokenizer(VOCAB).save(str(path))
        tokenizer = GrammarTokenizer(path, VOCAB)
        process = GrammarProcess(path, VOCAB)
        for name, wanted in asked().items():
            await process.start()
            started = time.perf_counter()
            row: dict[str, object]
            try:
                grammar = await process.grammar(wanted, "benchmark")
                row = {"answer_ms": round((time.perf_counter() - started) * 1e3, 1)}
                row["peak_mb"] = peak_mb(process)
                walks = [slowest(tokenizer, grammar, steps, seed) for seed in (0, 1, None)]
                worst = max(walks)
                row |= {"mask_ms": round(worst[0], 2), "mean_ms": round(worst[1], 2)}
                row["ends"] = worst[2]
            except InvalidRequest as error:
                row = {"answer_ms": round((time.perf_counter() - started) * 1e3, 1)}
                row |= {"peak_mb": peak_mb(process), "refused": str(error)[:120]}
            told[name] = row
            print(f"{name:36}", json.dumps(row)[:150], flush=True)
        await process.close()
    let_in = [row for row in told.values() if "mask_ms" in row]
    return {
        "vocab": VOCAB,
        "steps": steps,
        "bombs": len(told),
        "let_in": len(let_in),
        "slowest_answer_ms": max(row["answer_ms"] for row in told.values()),  # type: ignore[type-var]
        "slowest_mask_ms": max(row["mask_ms"] for row in let_in),  # type: ignore[type-var]
        "peak_mb": max(row["peak_mb"] for row in told.values()),  # type: ignore[type-var]
        "each": told,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    recording.record("structured_bombs", asyncio.run(measure(given.steps)), save=given.save)


if __name__ == "__main__":
    main()
