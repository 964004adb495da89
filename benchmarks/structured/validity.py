"""Answers of random models beside what they were asked to be.

    python -m benchmarks.structured.validity [--seeds 2] [--only llama ...] [--save]

Every family with random weights, tokenizers of every kind that can be read, every constraint of
`asked`: greedily, at temperature 1, and at temperature 1 with a bias to what closes strings and
brackets, so that more of them end. Texts are what a client sees, by the gateway's own detokenizer.

whole      ended by themselves: parsed, and valid by `jsonschema` (Draft 2020-12), the regex, or one
           of the choices
cut        at max_tokens: the beginning of an answer by a matcher that saw nothing of it
wrong      neither; each is listed
unspeakable  refused, no output could ever be complete: Unigram has no bytes for rare characters
ahead      how many of the answers came from a device that is a step ahead of its host
mates      rows without a grammar, their log-probabilities included, bit for bit as among others
long       answers of more than 8,000 tokens in a context of 32,768
"""

import argparse
import dataclasses
import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from jsonschema import Draft202012Validator

from benchmarks import recording
from benchmarks.structured.asked import LONG, constraints
from benchmarks.structured.worlds import TOKENIZERS, Ended, World, configs
from gpu_worker.batch.plans import RowSampling
from kernels import native
from tests.support.mini_scheduler import MiniScheduler

SLOTS: Final = 64
CONTEXT: Final = 320
ANSWER: Final = 300
LONG_CONTEXT: Final = 32768
BIAS: Final = 4.0
CLOSING: Final = ('"', "}", "]", ",", '"}', '"]')
MATES: Final = 4
MATE_TOKENS: Final = 32


def why_wrong(text: str, question: dict[str, Any], expected: Any) -> str:
    """Of an answer that ended by itself. Empty: nothing is."""
    if question["form"] == "choice":
        return "" if text in expected else "is none of the choices"
    if question["form"] in ("regex", "grammar"):
        return "" if re.fullmatch(expected, text) else "does not match"
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"does not parse: {error}"
    found = next(Draft202012Validator(expected).iter_errors(value), None)
    return "" if found is None else f"is invalid: {found.message}"


def why_no_beginning(world: World, grammar: str, ended: Ended) -> str:
    if ended.reason != "LENGTH":
        return f"broke: {ended.error}"
    taken = world.read.compiled(grammar).try_consume_tokens(ended.tokens)
    return "" if taken == len(ended.tokens) else f"leaves its grammar after {taken} tokens"


@dataclasses.dataclass
class Tally:
    """Of answers so far."""

    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    wrong: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    # Refused when they were compiled: the tokenizer has no tokens for them.
    unspeakable: list[str] = dataclasses.field(default_factory=list)
    longest: int = 0

    def take(self, world: World, case: dict[str, Any], grammar: str, ended: Ended) -> None:
        text = world.text(ended)
        if ended.reason == "STOP":
            kind, why = "whole", why_wrong(text, case["question"], case["expected"])
        else:
            kind, why = "cut", why_no_beginning(world, grammar, ended)
        self.counts["wrong" if why else kind] += 1
        self.counts["tokens"] += len(ended.tokens)
        self.longest = max(self.longest, len(ended.tokens))
        if why:
            named = {key: case[key] for key in ("name", "model", "tokenizer", "way")}
            self.wrong.append(named | {"why": why[:200], "text": text[:200]})


def ways(world: World, seeds: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name, and how rows sample."""
    yield "greedy", {"temperature": 0.0}
    ids = {token: world.pieces_id(token) for token in CLOSING}
    bias = tuple((each, BIAS) for each in sorted({i for i in ids.values() if i is not None}))
    for seed in range(seeds):
        yield f"seed {seed}", {"seed": seed, "logit_bias": bias if seed % 2 == 0 else ()}


def judge(name: str, kind: str, world: World, seeds: int, tally: Tally, asked: Any) -> None:
    speakable = [case for case in asked if world.grammar(case[1])]
    unspeakable = [f"{kind}: {case[0]}" for case in asked if case not in speakable]
    tally.unspeakable = sorted({*tally.unspeakable, *unspeakable})
    asked, compiled = speakable, [world.grammar(question) for _, question, _ in speakable]
    for number, (way, changes) in enumerate(ways(world, seeds)):
        wishes = [world.wish(max_tokens=ANSWER, grammar=each, **changes) for each in compiled]
        is_ahead = number == seeds
        for case, grammar, ended in zip(
            asked, compiled, world.run(wishes, is_ahead=is_ahead), strict=True
        ):
            about = dict(zip(("name", "question", "expected"), case, strict=True))
            tally.take(
                world, about | {"model": name, "tokenizer": kind, "way": way}, grammar, ended
            )
            tally.counts["ahead"] += is_ahead


def mates_equal(world: World) -> int:
    """How many rows without a grammar are bit for bit the same among rows with one."""
    plain = [world.wish(seed=seed, max_tokens=MATE_TOKENS, stop_token_ids=(), logprobs=3)
             for seed in range(MATES)]  # fmt: skip
    neighbour = world.wish(max_tokens=MATE_TOKENS, stop_token_ids=(world.stop,))
    grammar = world.grammar({"form": "regex", "value": "[a-z ]{200}", "is_tight": False})
    told = [
        _lives(world, [*plain, *[dataclasses.replace(neighbour, **each)] * MATES])
        for each in ({"stop_token_ids": ()}, {"grammar": grammar})
    ]
    return sum(told[0][row] == told[1][row] for row in range(MATES))


def _lives(world: World, wishes: list[RowSampling]) -> list[Any]:
    scheduler = MiniScheduler(world.limits, lease_steps=4)
    for index, wish in enumerate(wishes):
        scheduler.submit([5 + index, 6, 7], wish)
    world.play(scheduler)
    return [
        (
            scheduler.outputs[row],
            [(each.logprob, each.top_logprobs) for each in scheduler.logprobs[row]],
        )
        for row in range(len(wishes))
    ]


def judge_long(folder: Path, tally: Tally) -> int:
    """How many of the answers are longer than 8,000 tokens; a context of 32,768."""
    world = World(folder, {}, TOKENIZERS["byte-level"](), LONG_CONTEXT, 4)
    question = {"form": "json", "value": json.dumps(LONG), "is_tight": True}
    grammar = world.grammar(question)
    drawn: list[dict[str, Any]] = [{"temperature": 1.0, "seed": seed} for seed in range(3)]
    each = [world.wish(max_tokens=LONG_CONTEXT - 8, grammar=grammar, **way)
            for way in [*drawn, {"temperature": 0.0}]]  # fmt: skip
    longer = 0
    for ended in world.run(each):
        case = {"name": "long", "question": question, "expected": LONG, "model": "llama, 32k"}
        tally.take(world, case | {"tokenizer": "byte-level", "way": ""}, grammar, ended)
        longer += len(ended.tokens) > 8000 and ended.reason == "STOP"
    return longer


def measure(seeds: int, only: list[str], with_long: bool) -> dict[str, object]:
    tally, mates, worlds, asked = Tally(), 0, [], constraints()
    started = time.process_time()
    kinds = list(TOKENIZERS)
    for index, (name, config) in enumerate(configs().items()):
        if only and name not in only:
            continue
        kind = kinds[index % len(kinds)]
        with tempfile.TemporaryDirectory() as folder:
            world = World(Path(folder), config, TOKENIZERS[kind](), CONTEXT, SLOTS)
            judge(name, kind, world, seeds, tally, asked)
            mates += mates_equal(world)
        worlds.append(f"{name}, {kind}")
        print(worlds[-1], dict(tally.counts), len(tally.wrong), flush=True)
    longer = 0
    if with_long:
        with tempfile.TemporaryDirectory() as folder:
            longer = judge_long(Path(folder), tally)
    counts = tally.counts
    return {
        "models": worlds,
        "constraints": len(asked),
        "ways": 1 + seeds,
        "answers": counts["whole"] + counts["cut"] + counts["wrong"],
        "whole": counts["whole"],
        "cut": counts["cut"],
        "wrong": tally.wrong,
        "unspeakable": tally.unspeakable,
        "ahead": counts["ahead"],
        "mates": f"{mates} of {MATES * len(worlds)}",
        "long": longer,
        "longest_tokens": tally.longest,
        "tokens": counts["tokens"],
        "cpu_s": round(time.process_time() - started),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--no-long", action="store_true")
    parser.add_argument("--save", action="store_true")
    asked = parser.parse_args()
    native.build()
    figures = measure(asked.seeds, asked.only, not asked.no_long)
    recording.record("structured_validity", figures, save=asked.save)


if __name__ == "__main__":
    main()
