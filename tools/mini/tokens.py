"""From documents to token ids: the tokenizer, the chat template, and what the loss may look at.

The template is the only definition of the chat format at run time; `chat_text` says the same thing
for training, and a test holds the two together.
"""

import json
import random
from collections.abc import Iterator
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tools.mini import chats, grammar

BOS: Final = "<|bos|>"
EOS: Final = "<|eos|>"
END: Final = "<|end|>"
# Marks of the Hermes way to call tools.
CALL: Final = ("<tool_call>", "</tool_call>")
RESPONSE: Final = ("<tool_response>", "</tool_response>")
# The order is the order of the ids, from 0.
SPECIALS: Final = (
    "<|pad|>", BOS, EOS, "<|system|>", "<|user|>", "<|assistant|>", END, *CALL, *RESPONSE,
)  # fmt: skip

# Tools are written without blanks: with them they would be twice as many tokens.
CHAT_TEMPLATE: Final = """\
{{- bos_token }}
{%- if tools %}
    {{- '<|system|>' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] | trim + '\n' }}{%- endif %}
    {{- '<tools>\n' }}
    {%- for tool in tools %}{{- tool | tojson(separators=(',', ':')) + '\n' }}{%- endfor %}
    {{- '</tools><|end|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('the roles are system, user, assistant and tool') }}
    {%- elif message['role'] == 'tool' %}
        {%- set before = messages[loop.index0 - 1]['role'] if not loop.first %}
        {%- set after = messages[loop.index0 + 1]['role'] if not loop.last %}
        {%- if before != 'tool' %}{{- '<|user|>' }}{%- endif %}
        {{- '<tool_response>\n' + message['content'] | trim + '\n</tool_response>' }}
        {%- if after != 'tool' %}{{- '<|end|>' }}{%- endif %}
    {%- elif not (tools and loop.first and message['role'] == 'system') %}
        {{- '<|' + message['role'] + '|>' }}
        {%- if message['content'] %}{{- message['content'] | trim }}{%- endif %}
        {%- for call in message['tool_calls'] or [] %}
            {{- '<tool_call>\n{"name": ' + call['function']['name'] | tojson + ', "arguments": ' }}
            {{- call['function']['arguments'] | tojson + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""

STOP_IDS: Final = (SPECIALS.index(EOS), SPECIALS.index(END))

# Of documents; the others are chats.
TEXT_SHARE: Final = 0.4

# One document as ids, and for each id whether the loss counts predicting it.
Document = tuple[list[int], list[bool]]


def special_id(name: str) -> int:
    return SPECIALS.index(name)


def chat_text(chat: chats.Chat) -> str:
    """What the chat template renders for this chat."""
    return BOS + "".join(opening + body for opening, body in _parts(chat))


def _parts(chat: chats.Chat) -> Iterator[tuple[str, str]]:
    """For each turn the token that opens it, and the rest."""
    turns = list(chat.turns)
    if chat.tools:
        said = turns.pop(0).content + "\n" if turns[0].role == "system" else ""
        tools = "".join(json.dumps(tool, separators=(",", ":")) + "\n" for tool in chat.tools)
        yield "<|system|>", f"{said}<tools>\n{tools}</tools>{END}"
    for turn in turns:
        if turn.call is not None:
            yield "<|assistant|>", "\n".join((CALL[0], turn.call.text(), CALL[1])) + END
        elif turn.role == "tool":
            yield "<|user|>", "\n".join((RESPONSE[0], turn.content, RESPONSE[1])) + END
        else:
            yield f"<|{turn.role}|>", turn.content + END


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


def encode_chat(tokenizer: Tokenizer, chat: chats.Chat) -> Document:
    """The loss sees the answers and their ends only: what people ask is not the model's to say."""
    ids, counted = [special_id(BOS)], [False]
    for opening, rest in _parts(chat):
        body = tokenizer.encode(rest, add_special_tokens=False).ids
        ids += [special_id(opening), *body]
        counted += [False, *[opening == "<|assistant|>"] * len(body)]
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
    if rng.random() < TEXT_SHARE:
        return encode_text(tokenizer, grammar.text(rng))
    return encode_chat(tokenizer, chats.chat(rng))


def _plain(rng: random.Random, documents: int) -> Iterator[str]:
    for _ in range(documents):
        yield grammar.text(rng)
        for _, rest in _parts(chats.chat(rng)):
            yield rest
