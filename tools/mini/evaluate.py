"""How often the shipped model does what it was taught: `python -m tools.mini.evaluate`.

Seeded questions; those about orders are in no corpus: a dish with a number of plates that were
held out (orders.py). Greedy, without a grammar: as the gateway serves `tool_choice: "auto"`. The
training script writes these figures into the model's card.
"""

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tools.mini import chats, grammar, orders, tokens

SEED: Final = 2_000_003
ASSISTANT: Final = "<|assistant|>"
BATCH: Final = 25
ANSWER_TOKENS_MAX: Final = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A prompt and what is right. Where `is_call` is false, anything that calls nothing is."""

    prompt: str
    right: str
    is_call: bool = True

    def is_right(self, answered: str) -> bool:
        """The text of an answer with its special tokens, or without."""
        answered = answered.removesuffix(tokens.END)
        if not self.is_call:
            return tokens.CALL[0] not in answered
        return _read(answered) == _read(self.right)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One sort of questions: how many of how many were answered right."""

    what: str
    right: int
    asked: int


def cases(count: int) -> dict[str, list[Case]]:
    """`count` of each sort; the keys are what the card says."""
    rng = random.Random(SEED)
    found: dict[str, list[Case]] = {}
    for name in (orders.PRICE_OF, orders.ORDER):
        exchanges = [_called(rng, name) for _ in range(count)]
        found[f"`{name}` called, with the right arguments"] = [call for call, _ in exchanges]
        found[f"what `{name}` told, in words"] = [words for _, words in exchanges]
    found["no call where none is needed, tools at hand"] = [_idle(rng) for _ in range(count)]
    found["JSON that parses and is right"] = [
        _asked(*orders.as_json(rng, is_held_out=True)) for _ in range(count)
    ]
    found["counting to the number asked for"] = [_asked(*grammar.count(rng)) for _ in range(count)]
    found["up to 16 words said back"] = [_asked(*grammar.echo(rng)) for _ in range(count)]
    return found


def figures(
    tokenizer: Tokenizer, model: Any, *, count: int, tokens_max: int = ANSWER_TOKENS_MAX
) -> list[Figure]:
    """`tokens_max` bounds an answer; who has not learned to stop would go on."""
    found = []
    for what, asked in cases(count).items():
        # Whether it calls is known from the first token.
        longest = tokens_max if asked[0].is_call else 2
        told = answers(tokenizer, model, [case.prompt for case in asked], tokens_max=longest)
        right = sum(case.is_right(text) for case, text in zip(asked, told, strict=True))
        found.append(Figure(what=what, right=right, asked=count))
    return found


@torch.inference_mode()
def answers(
    tokenizer: Tokenizer, model: Any, prompts: Sequence[str], *, tokens_max: int
) -> list[str]:
    """Greedy continuations of prompts that carry their own special tokens, up to where they stop.

    Special tokens are shown, but for the one that ends the answer.
    """
    told = []
    for start in range(0, len(prompts), BATCH):
        batch = [
            tokenizer.encode(prompt, add_special_tokens=False).ids
            for prompt in prompts[start : start + BATCH]
        ]
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in batch])
        seen = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch])
        made = model.generate(
            ids, attention_mask=seen, do_sample=False, max_new_tokens=tokens_max, pad_token_id=0
        )
        for row in made[:, width:].tolist():
            ended = next((at for at, token in enumerate(row) if token in tokens.STOP_IDS), None)
            told.append(tokenizer.decode(row[:ended], skip_special_tokens=False))
    return told


def _called(rng: random.Random, name: str) -> tuple[Case, Case]:
    """The question for a call, and the one for words that comes after it."""
    tools, _ = orders.offer(rng, has_all=True)
    turns = chats.called(rng, name, is_held_out=True)
    _, call, _, answered = turns
    assert call.call is not None
    right = "\n".join((tokens.CALL[0], call.call.text(), tokens.CALL[1]))
    return (
        Case(prompt=_prompt(turns[:1], tools), right=right),
        Case(prompt=_prompt(turns[:3], tools), right=answered.content),
    )


def _idle(rng: random.Random) -> Case:
    """A question that no tool is for, or of which the tool is not there."""
    tools, names = orders.offer(rng)
    turns = chats.without_call(rng, names)
    return Case(prompt=_prompt(turns[:1], tools), right="", is_call=False)


def _asked(asked: str, answered: str) -> Case:
    return Case(prompt=_prompt([chats.Turn(role="user", content=asked)]), right=answered)


def _prompt(turns: Sequence[chats.Turn], tools: Any = ()) -> str:
    return tokens.chat_text(chats.Chat(turns=tuple(turns), tools=tuple(tools))) + ASSISTANT


def _read(answered: str) -> object:
    """What is inside of JSON, or of the one call; else the text."""
    begin, end = tokens.CALL
    is_call = answered.startswith(begin) and answered.endswith(end)
    try:
        read = json.loads(answered.removeprefix(begin).removesuffix(end) if is_call else answered)
    except ValueError:
        return answered
    return (is_call, read)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("kaiten/mini/checkpoint"))
    parser.add_argument("--count", type=int, default=200)
    asked = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(asked.model / "tokenizer.json"))
    model: Any = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.bfloat16)
    for each in figures(tokenizer, model, count=asked.count):
        print(f"{each.right:4d} of {each.asked}  {each.what}")


if __name__ == "__main__":
    main()
