"""What a client constrains its output to, compiled where it can be killed."""

import asyncio
import json
import resource
import signal
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest

from gateway.children.grammar_process import GrammarProcess
from gateway.children.pool import ChildLimits
from kaiten.mini import CHECKPOINT
from kaiten.v1.common_pb2 import Choices, StructuredOutputs
from service_kit.errors import InvalidRequest, Unavailable
from service_kit.grammars import GrammarTokenizer
from tests.support.answers import until

VOCAB = 1536
TOKENIZER = CHECKPOINT / "tokenizer.json"


@pytest.fixture(scope="module")
def tokenizer() -> GrammarTokenizer:
    return GrammarTokenizer(TOKENIZER, VOCAB)


@pytest.fixture
async def process() -> AsyncIterator[GrammarProcess]:
    running = GrammarProcess(TOKENIZER, VOCAB, ChildLimits(answer_s_max=60.0))
    yield running
    await running.close()


def takes(tokenizer: GrammarTokenizer, grammar: str, text: str) -> bool:
    """Whether the text is all of an output."""
    matcher = tokenizer.compiled(grammar)
    token_ids = tokenizer.tokens.tokenize_str(text)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        {"json": json.dumps(PERSON)},
        ['{"name":"é","age":3}', '{"name": "x", "age": -3}', '{\n  "name": "",\n  "age": 0\n}'],
        ['{"name":"x"}', '{"name":"x","age":3.5}', '{"name":"x","age":3,"b":1}', "[]", ""],
    ),
    (
        {"json": json.dumps(PERSON), "disable_any_whitespace": True},
        ['{"name":"a b","age":3}'],
        ['{"name": "a b","age":3}'],
    ),
    ({"json": "true"}, ["1", '{"a": []}'], ["a"]),
    ({"json_object": True}, ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", '{"a"}']),
    ({"regex": "[a-c]+|x{3}"}, ["abc", "xxx"], ["", "xx", "abcx"]),
    (
        {"choice": Choices(texts=["yes", 'no "\\\n', "日本"])},
        ["yes", 'no "\\\n', "日本"],
        ["no", "yesno", ""],
    ),
    ({"grammar": 'start: "a" rest\nrest: ("b" | "c")*'}, ["a", "abcb"], ["b", ""]),
    ({"grammar": 'root ::= "yes" | "no" [0-9]'}, ["yes", "no7"], ["no"]),
]


@pytest.mark.parametrize(("wanted", "members", "others"), FORMS)
async def test_each_form_is_its_language(
    process: GrammarProcess,
    tokenizer: GrammarTokenizer,
    wanted: dict[str, Any],
    members: list[str],
    others: list[str],
) -> None:
    grammar = await process.grammar(StructuredOutputs(**wanted), "t")
    assert [takes(tokenizer, grammar, text) for text in members] == [True] * len(members)
    assert [takes(tokenizer, grammar, text) for text in others] == [False] * len(others)


async def test_white_space_has_an_end(process: GrammarProcess, tokenizer: GrammarTokenizer) -> None:
    grammar = await process.grammar(StructuredOutputs(json_object=True), "t")
    assert takes(tokenizer, grammar, "{\n" + " " * 40 + "}")
    assert not takes(tokenizer, grammar, "{\n" + " " * 41 + "}")
    assert not takes(tokenizer, grammar, "{\n\n}")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"json": '{"type": "thing"}'}, "Invalid type: thing"),
    ({"json": '{"type": '}, "EOF while parsing"),
    ({"json": '{"uniqueItems": true}'}, r'Unimplemented keys: \["uniqueItems"\]'),
    ({"json": '{"$ref": "https://example.com/x"}'}, "Default retriever does not fetch"),
    ({"json": "false"}, "Unsatisfiable schema"),
    ({"json": "[" * 30_000}, "expected|recursion"),
    ({"regex": "a("}, "unclosed group"),
    ({"regex": "(?<=a)b"}, "look-around"),
    ({"grammar": 'start: "a" other'}, 'unknown name: "other"'),
    ({"grammar": "start: start"}, "no output could ever be complete"),
    (
        {"json": '{"type": "array", "items": {"$ref": "#"}, "minItems": 1}'},
        "items: no output could",
    ),
    ({"grammar": "nothing"}, "neither Lark nor GBNF"),
    (
        {"json": json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(2500)}})},
        "too big",
    ),
]


@pytest.mark.parametrize(("wanted", "reason"), WRONG)
async def test_what_is_wrong_is_said_in_a_line_and_costs_no_child(
    process: GrammarProcess, wanted: dict[str, Any], reason: str
) -> None:
    await process.start()
    children = [child.process for child in process._children]
    with pytest.raises(InvalidRequest, match=reason) as caught:
        await process.grammar(StructuredOutputs(**wanted), "t")
    assert caught.value.field == "sampling.structured_outputs"
    assert caught.value.rule.startswith("the grammar cannot be compiled: ")
    assert "\n" not in caught.value.rule
    assert [child.process for child in process._children] == children


async def test_whether_the_tokens_that_are_left_begin_an_output(
    process: GrammarProcess, tokenizer: GrammarTokenizer
) -> None:
    choice = await process.grammar(StructuredOutputs(choice=Choices(texts=["yes", "no"])), "t")
    matcher = tokenizer.compiled(choice)
    # Looked at, not taken: it stays at its beginning.
    first = [each for each in range(VOCAB) if matcher.validate_tokens([each]) == 1]
    other, end = next(each for each in range(VOCAB) if each not in first), 2
    assert await process.begins(choice, [], [], [], tenant="t")
    assert await process.begins(choice, [other, first[-1]], [], [], tenant="t")
    assert not await process.begins(choice, [other, end], [], [end], tenant="t")
    assert await process.begins(choice, [], first[1:], [], tenant="t")
    assert not await process.begins(choice, [], first, [], tenant="t")
    # What is complete already may end.
    maybe = await process.grammar(StructuredOutputs(regex="(yes)?"), "t")
    assert await process.begins(maybe, [other, end], [], [end], tenant="t")
    assert not await process.begins(maybe, [other], [], [end], tenant="t")


async def test_one_that_takes_too_long_ends_its_child_and_nobody_else_waits(
    process: GrammarProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGPROF is what a child gets of its timer."""
    await asyncio.gather(*(child.start() for child in process._children))
    slow, other = process._children
    slow_process = slow.process
    assert slow_process is not None
    process._free.get_nowait()
    process._free.get_nowait()
    process._free.put_nowait(slow)
    psutil.Process(slow_process.pid).suspend()
    asking = asyncio.create_task(process.grammar(StructuredOutputs(regex="a"), "t"))
    await until(process._free.empty, "the child to be asked")
    process._free.put_nowait(other)
    assert await process.grammar(StructuredOutputs(regex="b"), "u")
    psutil.Process(slow_process.pid).send_signal(signal.SIGPROF)
    psutil.Process(slow_process.pid).resume()
    with pytest.raises(InvalidRequest, match="the grammar outgrew its memory or time"):
        await asking
    assert await process.grammar(StructuredOutputs(regex="c"), "t")


async def test_one_schema_is_compiled_once(process: GrammarProcess) -> None:
    wanted = StructuredOutputs(regex="ab")
    grammar = await process.grammar(wanted, "t")
    await process.close()
    assert await process.grammar(StructuredOutputs(regex="ab"), "t") == grammar
    assert all(child.process is None for child in process._children)


async def test_a_tenant_that_floods_leaves_the_others_a_child(process: GrammarProcess) -> None:
    await asyncio.gather(*(child.start() for child in process._children))
    pids = [child.process.pid for child in process._children if child.process is not None]
    # Who was used last comes first, and is first here.
    psutil.Process(pids[0]).suspend()
    flood = [
        asyncio.create_task(process.grammar(StructuredOutputs(regex=f"a{index}"), "flood"))
        for index in range(5)
    ]
    await until(lambda: process._free.qsize() == 1, "the first to be asked")
    assert await process.grammar(StructuredOutputs(regex="b"), "quiet")
    assert not any(each.done() for each in flood)
    psutil.Process(pids[0]).resume()
    assert len(await asyncio.gather(*flood)) == 5


async def test_one_that_cannot_be_made_is_unavailable_and_made_later(
    process: GrammarProcess,
) -> None:
    wanted, limits = StructuredOutputs(regex="a"), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(Unavailable, match="the grammar does not start"):
            await process.grammar(wanted, "t")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert await process.grammar(wanted, "t")
