"""Random models of every family, each with a tokenizer, that sample by grammars in one process."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.structured.asked import constraints
from gateway.children.child import Refused
from gateway.children.grammar_child import Compiler
from gateway.text.choice_text import ChoiceText
from gateway.text.detokenizer import Pieces
from gpu_worker.batch.grammar_masks import GrammarMasks
from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.batch.plans import RowSampling
from gpu_worker.batch.rows import Rows
from gpu_worker.model.config import read_config
from gpu_worker.model.families import FAMILIES
from gpu_worker.runner.stepping import InTurns, OneAhead
from kernels import dispatch
from service_kit.grammars import GrammarTokenizer
from tests.parity.published import PUBLISHED
from tests.support import tokenizers
from tests.support.ahead import Model, play
from tests.support.mini_scheduler import MiniScheduler, sampling
from tests.support.random_model import write_random_model

# More than any of the tokenizers has, as models do.
VOCAB: Final = 500


def unigram() -> Tokenizer:
    """Of every character that is asked for: such tokenizers have no bytes for others."""
    characters = "".join(map(chr, [*range(32, 127), *range(0xE0, 0x100), 9, 10]))
    asked = [json.dumps(each, ensure_ascii=False) for each in constraints()]
    texts = [*tokenizers.CORPUS, *characters, *asked, "e\u0301 \u2028 \u0001 naïve 👩\u200d👩"]
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=VOCAB - 20,
        special_tokens=list(tokenizers.SPECIALS),
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


# Those that can be read: llguidance has no names for the decoders of WordPiece and WordLevel.
TOKENIZERS: Final[dict[str, Callable[[], Tokenizer]]] = {
    "byte-level": tokenizers.byte_level_bpe,
    "sentencepiece": tokenizers.sentencepiece_bpe,
    "sentencepiece, no strip": tokenizers.gemma_like_bpe,
    "unigram": unigram,
}
BLOCK: Final = 16
NEVER_CUT: Final = 1 << 30


def configs() -> dict[str, dict[str, Any]]:
    """Of each family one that was published, or what is special of it."""
    found: dict[str, dict[str, Any]] = {}
    for config in PUBLISHED.values():
        found.setdefault(config["architectures"][0], config)
    for name, family in FAMILIES.items():
        found.setdefault(name, {"architectures": [name], "model_type": family.model_type})
    return {FAMILIES[name].model_type: found[name] for name in FAMILIES}


@dataclass(frozen=True, slots=True)
class Ended:
    tokens: list[int]
    # Empty: the row broke, and `error` says why.
    reason: str
    error: str


class World:
    """`folder` is written. A context is at least prompt and answer."""

    def __init__(
        self, folder: Path, config: dict[str, Any], tokenizer: Tokenizer, context: int, slots: int
    ) -> None:
        vocab = {"vocab_size": VOCAB, "max_position_embeddings": max(context, 512)}
        write_random_model(folder, seed=len(str(config)), **(config | vocab))
        path = folder / "tokenizer.json"
        tokenizer.save(str(path))
        windows = read_config(folder).groups.windows
        self.limits = RowLimits(
            slots=slots,
            context_tokens=context,
            step_tokens=slots * BLOCK,
            block_size=BLOCK,
            block_count=slots * -(-context // BLOCK) * len(windows),
            vocab_size=VOCAB,
            windows=windows,
            reads_grammars=True,
        )
        self.model = Model(folder, self.limits)
        self.read = GrammarTokenizer(path, VOCAB)
        self.compiler = Compiler({"tokenizer": str(path), "vocab_size": VOCAB})
        self.pieces, self.pieces_id = Pieces(tokenizer), tokenizer.token_to_id
        self.stop = tokenizers.token_id(tokenizer, "<|end|>")

    def grammar(self, question: dict[str, Any]) -> str:
        """Empty: the tokenizer has no tokens for it."""
        try:
            return str(self.compiler(question)["grammar"])
        except Refused as error:
            if "no output could ever be complete" not in str(error):
                raise
            return ""

    def wish(self, **changes: Any) -> RowSampling:
        base = {"max_tokens": 16, "temperature": 1.0, "stop_token_ids": (self.stop,)}
        return sampling(**(base | changes))

    def run(self, wishes: Sequence[RowSampling], *, is_ahead: bool = False) -> list[Ended]:
        """All of them, as many at once as there are slots."""
        scheduler = MiniScheduler(self.limits, lease_steps=8)
        for index, wish in enumerate(wishes):
            scheduler.submit([7 + index % 89, 8, 9], wish)
        self.play(scheduler, is_ahead=is_ahead)
        return [
            Ended(
                tokens,
                scheduler.reasons[row].name if row in scheduler.reasons else "",
                scheduler.errors.get(row, ""),
            )
            for row, tokens in scheduler.outputs.items()
        ]

    def play(self, scheduler: MiniScheduler, *, is_ahead: bool = False) -> None:
        """What was submitted, to its end."""
        rows = Rows(self.limits, GrammarMasks(self.read, VOCAB))
        if not is_ahead:
            play(InTurns(rows, self.model.turn_device()), scheduler, lambda: NEVER_CUT)
            return
        # A device that is ahead has rows that are empty, which the native kernels refuse.
        dispatch.force("torch")
        try:
            play(OneAhead(rows, self.model.resident()), scheduler, lambda: NEVER_CUT)
        finally:
            dispatch.force(None)

    def text(self, ended: Ended) -> str:
        """As the gateway shows it."""
        shown = ChoiceText(self.pieces, (), keep_leading_space=True)
        if ended.reason == "STOP":
            return shown.feed(ended.tokens[:-1]).text + shown.feed_last(ended.tokens[-1]).text
        return shown.feed(ended.tokens).text + shown.flush().text
