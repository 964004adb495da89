"""From documents to token ids: the tokenizer, the chat template, and what the loss may look at.

The template is the only definition of the chat format at run time; `chat_text` says the same thing
for training, and a test holds the two together.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tools.mini import grammar

BOS: Final = "<|bos|>"
EOS: Final = "<|eos|>"
END: Final = "<|end|>"
# The order is the order of the ids, from 0.
SPECIALS: Final = ("<|pad|>", BOS, EOS, "<|system|>", "<|user|>", "<|assistant|>", END)

CHAT_TEMPLATE: Final = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('the roles are system, user and assistant') }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

STOP_IDS: Final = (SPECIALS.index(EOS), SPECIALS.index(END))

# One document as ids, and for each id whether the loss counts predicting it.
Document = tuple[list[int], list[bool]]


def special_id(name: str) -> int:
    return SPECIALS.index(name)


def chat_text(turns: Sequence[grammar.Turn]) -> str:
    """What the chat template renders for these turns."""
    return BOS + "".join(f"<|{turn.role}|>{turn.content}{END}" for turn in turns)


def train_tokenizer(*, seed: int, documents: int, vocab_size: int) -> Tokenizer:
    """A byte-level BPE over texts and chats: every string has a tokenization and comes back."""
    rng = random.Random(seed)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(name, special=True, normalized=False) for name in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_plain(rng, documents), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, special_id(BOS))]
    )
    return tokenizer


def tokenizer_config(*, positions: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": SPECIALS[0],
        "additional_special_tokens": list(SPECIALS[3:]),
        "clean_up_tokenization_spaces": False,
        "model_max_length": positions,
        "chat_template": CHAT_TEMPLATE,
    }


def encode_text(tokenizer: Tokenizer, text: str) -> Document:
    ids = tokenizer.encode(BOS + text + EOS, add_special_tokens=False).ids
    return ids, [False] + [True] * (len(ids) - 1)


def encode_chat(tokenizer: Tokenizer, turns: Sequence[grammar.Turn]) -> Document:
    """The loss sees the answers and their ends only: what people ask is not the model's to say."""
    ids, counted = [special_id(BOS)], [False]
    for turn in turns:
        body = tokenizer.encode(turn.content + END, add_special_tokens=False).ids
        ids += [special_id(f"<|{turn.role}|>"), *body]
        counted += [False, *[turn.role == "assistant"] * len(body)]
    return ids, counted


def rows(
    tokenizer: Tokenizer, rng: random.Random, *, length: int, waiting_count: int = 32
) -> Iterator[list[Document]]:
    """Endless rows: whole documents that together have at most `length` ids.

    A row begins with the oldest of the waiting documents and takes every other that still fits, so
    a long document is never starved by short ones. The rare one longer than a row is drawn again.
    """
    waiting: list[Document] = []
    while True:
        while len(waiting) < waiting_count:
            document = _document(tokenizer, rng)
            if len(document[0]) <= length:
                waiting.append(document)
        row: list[Document] = []
        left = length
        for document in list(waiting):
            if len(document[0]) <= left:
                waiting.remove(document)
                row.append(document)
                left -= len(document[0])
        yield row


def _document(tokenizer: Tokenizer, rng: random.Random) -> Document:
    if rng.random() < 0.5:
        return encode_text(tokenizer, grammar.text(rng))
    return encode_chat(tokenizer, grammar.chat(rng))


def _plain(rng: random.Random, documents: int) -> Iterator[str]:
    for _ in range(documents):
        yield grammar.text(rng)
        for turn in grammar.chat(rng):
            yield turn.content
