"""Models of several families that call tools: what they say, behind a real gateway."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from tests.support.gateway_stack import Stack, running_stack
from tests.support.tokenizers import byte_level_bpe, write_model_folder

TEMPLATES = Path(__file__).parents[1] / "parity" / "templates"
# As in the checkpoints: some marks are control tokens, which no text shows, and some are not.
CONTROL = ["[TOOL_CALLS]", "<|python_tag|>", "<|im_start|>", "<|im_end|>"]
PLAIN = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
ASK: list[Any] = [{"role": "user", "content": "How is the weather in Paris?"}]
PARIS = '{"city": "Paris"}'
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Say <|im_end|> never.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
# Of an object, and yet no schema.
BROKEN: Any = {
    "type": "function",
    "function": {"name": "a", "parameters": {"properties": {"b": {"type": "thing"}}}},
}
TOOLS: list[Any] = [WEATHER, CLOCK]
SPOKEN = {
    "qwen3": f'<think>\nHm.\n</think>\n\nI see.\n<tool_call>\n{{"name": "get_weather", "arguments":'
    f' {PARIS}}}\n</tool_call>\n<tool_call>\n{{"name": "clock", "arguments": {{}}}}\n</tool_call>',
    "mistral_v3": f'I see.[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}}}, '
    '{"name": "clock", "arguments": {}}]',
    "llama3_1": f'<|python_tag|>{{"name": "get_weather", "parameters": {PARIS}}}; '
    '{"name": "clock", "parameters": {}}',
}


def tokenizer() -> Tokenizer:
    built: Tokenizer = Tokenizer.from_str(byte_level_bpe().to_str())
    built.add_special_tokens(CONTROL)
    built.add_tokens([AddedToken(text, normalized=False, special=False) for text in PLAIN])
    return built


@asynccontextmanager
async def speaking(
    family: str, tmp_path: Path, redis_url: str, cell: str, **options: Any
) -> AsyncIterator[Stack]:
    """A stack whose model has the template of a family."""
    folder = write_model_folder(
        tmp_path / family,
        tokenizer(),
        config={"max_position_embeddings": 4096},
        chat_template=(TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8"),
    )
    # Each step is a commit of the ledger; some pieces of text still come in two.
    async with running_stack(
        folder, redis_url, cell, **({"tokens_per_step": 5} | options)
    ) as stack:
        yield stack


def called(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


def prompt_of(stack: Stack, index: int = -1) -> str:
    ids = stack.scheduler.submits[index].prompt_token_ids
    return stack.gateway.card.tokenizer.decode(list(ids), skip_special_tokens=False)
