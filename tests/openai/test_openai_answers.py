"""What the OpenAI package gets for right requests: whole by one client, streamed by the other."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, OpenAI
from tokenizers import Tokenizer

from kaiten.mini import CHECKPOINT
from tests.support.whole_stack import MODEL, WAIT_S, WholeStack

# Eight tokens of which the shipped model is sure, by ten nats: rounded otherwise, as on another
# processor, they are the same.
PROMPT = "The chef says"
GREEDY = " that good rice needs time and warm hands"
FIRST, SECOND, THIRD = GREEDY.split()[:3]
ID_OF = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json")).get_vocab()
HELLO = [{"role": "user", "content": "Hello!"}]
Body = dict[str, Any]
# What is said of an answer: one sentence of truth about it.
Truth = Callable[[Any], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A request and what holds of its answer."""

    name: str
    body: Body
    truth: Truth
    is_chat: bool = False

    @property
    def asked(self) -> Body:
        """As the package's arguments."""
        base: Body = {"model": MODEL, "max_tokens": 12, "temperature": 0}
        base |= {"messages": HELLO} if self.is_chat else {"prompt": PROMPT}
        # An argument of None is left out.
        return {key: value for key, value in {**base, **self.body}.items() if value != "unset"}


def text(answer: Any, index: int = 0) -> str:
    """Of one choice, of either endpoint."""
    choice = answer.choices[index]
    return str(choice.message.content if hasattr(choice, "message") else choice.text)


def reasons(answer: Any) -> set[str]:
    return {choice.finish_reason for choice in answer.choices}


def texts(answer: Any) -> list[str]:
    return [text(answer, index) for index in range(len(answer.choices))]


def count(answer: Any) -> int:
    return int(answer.usage.completion_tokens)


def complete(name: str, truth: Truth, **body: Any) -> Case:
    return Case(name=name, body=body, truth=truth)


def chat(name: str, truth: Truth, **body: Any) -> Case:
    return Case(name=f"chat: {name}", body=body, truth=truth, is_chat=True)


def is_greedy(answer: Any) -> bool:
    return text(answer) == GREEDY


def adds_up(answer: Any) -> bool:
    usage = answer.usage
    return bool(
        usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        and usage.prompt_tokens > 0
    )


def is_plain(answer: Any) -> bool:
    """What every answer has, and nothing that was not asked for."""
    assert (answer.object, answer.model) == ("text_completion", MODEL)
    assert answer.id
    assert answer.created
    assert (reasons(answer), count(answer)) == ({"length"}, 12)
    assert answer.choices[0].logprobs is None
    return adds_up(answer)


def is_plain_chat(answer: Any) -> bool:
    message = answer.choices[0].message
    assert answer.object == "chat.completion"
    assert (message.role, message.tool_calls) == ("assistant", None)
    assert len(message.content) > 3
    return adds_up(answer)


def logprobs_are_sound(answer: Any) -> bool:
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 5
    assert "".join(logprobs.tokens) == text(answer)
    assert all(-50 < value <= 0 for value in logprobs.token_logprobs)
    # Greedy: nothing is likelier than what was taken.
    for own, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert math.isclose(max(top.values()), own, abs_tol=1e-6)
    return True


def chat_logprobs_are_sound(answer: Any) -> bool:
    content = answer.choices[0].logprobs.content
    assert len(content) == count(answer)
    joined = b"".join(bytes(item.bytes) for item in content).decode()
    assert joined.startswith(text(answer))
    for item in content:
        assert len(item.top_logprobs) == 3
        best = [top.logprob for top in item.top_logprobs]
        assert best == sorted(best, reverse=True)
        assert math.isclose(best[0], item.logprob, abs_tol=1e-6)
    return True


def echoed_logprobs_are_sound(answer: Any) -> bool:
    """Evaluation harnesses read these: the prompt's tokens, the first without a value."""
    logprobs, usage = answer.choices[0].logprobs, answer.usage
    total = usage.prompt_tokens + usage.completion_tokens
    columns = (logprobs.token_logprobs, logprobs.top_logprobs, logprobs.text_offset)
    assert [len(logprobs.tokens), *map(len, columns)] == [total] * 4
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    assert all(-100 < value <= 0 for value in logprobs.token_logprobs[1:])
    for own, top in zip(logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=True):
        assert max(top.values()) >= own
    for token, offset in list(zip(logprobs.tokens, logprobs.text_offset, strict=True))[1:]:
        assert text(answer)[offset:].startswith(token)
    return True


def prompt_logprobs_are_sound(answer: Any, told: Any) -> bool:
    """vLLM's form: by token id, the prompt's own first."""
    assert len(told) == answer.usage.prompt_tokens
    assert told[0] is None
    for position in told[1:]:
        own, *_ = position.values()
        assert 2 <= len(position) <= 3
        assert set(own) == {"logprob", "rank", "decoded_token"}
        best = [entry["logprob"] for entry in position.values() if entry["rank"] is not None]
        assert max(best) >= own["logprob"]
    return True


COMPLETIONS = [
    complete("greedy", is_plain),
    complete("one token", lambda a: count(a) == 1, max_tokens=1),
    complete("no max_tokens", lambda a: count(a) == 16, max_tokens="unset", ignore_eos=True),
    complete("a list of texts", lambda a: len(a.choices) == 2, prompt=["The chef", "The salmon"]),
    complete("token ids", lambda a: a.usage.prompt_tokens == 4, prompt=[1, 70, 71, 72]),
    complete("lists of ids", lambda a: len(a.choices) == 2, prompt=[[1, 70], [1, 71]]),
    complete("unicode", lambda a: count(a) == 12, prompt="寿司 🍣 ñandú \u202e\u0000 tail"),
    complete("special text", lambda a: count(a) >= 1, prompt="<|user|></s><|assistant|>"),
    complete("echo", lambda a: text(a).startswith(f"{PROMPT} {FIRST}"), echo=True),
    complete(
        "greedy choices agree",
        lambda a: [c.index for c in a.choices] == [0, 1, 2] and len(set(texts(a))) == 1,
        n=3,
    ),
    complete("n and best_of", lambda a: len(a.choices) == 2, n=2, best_of=2),
    complete("n counts every token", lambda a: count(a) == 36, n=3, ignore_eos=True),
    complete(
        "hot choices differ",
        lambda a: len(set(texts(a))) > 1,
        n=4,
        temperature=1.5,
        seed=3,
        max_tokens=24,
    ),
    complete("a stop string", lambda a: text(a) == f" {FIRST} {SECOND} ", stop=THIRD),
    complete("stopping says stop", lambda a: reasons(a) == {"stop"}, stop=["nowhere", SECOND]),
    complete(
        "a stop over token borders",
        lambda a: text(a) == f" {FIRST} {SECOND[:-2]}",
        stop=f"{SECOND[-2:]} {THIRD[:2]}",
    ),
    complete(
        "the stop string on request",
        lambda a: text(a) == f" {FIRST} {SECOND} {THIRD}",
        stop=THIRD,
        include_stop_str_in_output=True,
    ),
    complete("four stops", lambda a: reasons(a) == {"stop"}, stop=["a", "b", "c", "d"]),
    complete("logprobs", logprobs_are_sound, logprobs=3, max_tokens=5),
    complete("only the sampled one's", lambda a: a.choices[0].logprobs, logprobs=0),
    complete("echo with logprobs", echoed_logprobs_are_sound, echo=True, logprobs=1),
    complete("scoring", echoed_logprobs_are_sound, echo=True, logprobs=5, max_tokens=1),
    complete(
        "scoring without output",
        lambda a: echoed_logprobs_are_sound(a) and count(a) == 0 and text(a) == PROMPT,
        echo=True,
        logprobs=1,
        max_tokens=0,
    ),
    complete(
        "scoring ids for each choice",
        lambda a: len(a.choices) == 4 and len({str(c.logprobs.tokens[:3]) for c in a.choices}) == 2,
        echo=True,
        logprobs=0,
        n=2,
        prompt=[[1, 70, 71], [1, 75, 76]],
    ),
    complete(
        "prompt_logprobs",
        lambda a: prompt_logprobs_are_sound(a, a.choices[0].prompt_logprobs),
        prompt_logprobs=2,
    ),
    complete("a seed", lambda a: count(a) == 12, seed=7, temperature=1.0, ignore_eos=True),
    complete("a negative seed", lambda a: count(a) >= 1, seed=-(2**63), temperature=1.0),
    complete("the largest seed", lambda a: count(a) >= 1, seed=2**63 - 1, temperature=1.0),
    complete("top_p", lambda a: count(a) >= 1, top_p=0.5, temperature=1.0, seed=5),
    complete("a tiny top_p", is_greedy, top_p=1e-9, temperature=1.0, max_tokens=8),
    complete("top_k of 1", is_greedy, top_k=1, temperature=1.0, max_tokens=8),
    complete("top_k of -1 is all", lambda a: SECOND in text(a), top_k=-1),
    complete("min_p of 1", is_greedy, min_p=1.0, temperature=1.0, max_tokens=8),
    complete("presence_penalty", lambda a: count(a) == 12, presence_penalty=2.0, ignore_eos=True),
    complete(
        "frequency_penalty ends loops",
        lambda a: text(a).count(f"{PROMPT} {FIRST}") == 0,
        frequency_penalty=2.0,
        max_tokens=24,
    ),
    complete("repetition_penalty", lambda a: count(a) >= 1, repetition_penalty=1.3),
    complete("a bias forces", lambda a: len(set(text(a))) == 1, logit_bias={"70": 100}),
    complete(
        "a bad word",
        lambda a: SECOND not in text(a),
        bad_words_token_ids=[[ID_OF[f"Ġ{SECOND}"]]],
    ),
    complete(
        "allowed tokens",
        lambda a: set(text(a)) <= set("ab"),
        allowed_token_ids=[ID_OF["a"], ID_OF["b"]],
    ),
    complete("min_tokens", lambda a: count(a) >= 8, min_tokens=8),
    complete("a stop token", lambda a: reasons(a) == {"stop"}, stop_token_ids=list(range(256))),
    complete("harmless fields", is_plain, user="me", priority=-3, suffix=""),
]

CHATS = [
    chat("an answer", is_plain_chat),
    chat(
        "prompt_logprobs",
        lambda a: prompt_logprobs_are_sound(a, a.prompt_logprobs),
        prompt_logprobs=2,
    ),
    chat("it ends by itself", lambda a: reasons(a) == {"stop"}, max_tokens=200),
    chat("max_completion_tokens", lambda a: count(a) == 3, max_completion_tokens=3, max_tokens=9),
    chat("n", lambda a: len(a.choices) == 2, n=2),
    chat("logprobs", chat_logprobs_are_sound, logprobs=True, top_logprobs=3),
    chat("logprobs alone", lambda a: a.choices[0].logprobs.content, logprobs=True),
    chat("a stop string", lambda a: "!" not in text(a), stop="!"),
    chat("a seed", lambda a: count(a) >= 1, seed=11, temperature=0.9),
    chat(
        "a bias", lambda a: set(text(a)) == {"a"}, logit_bias={str(ID_OF["a"]): 100}, max_tokens=4
    ),
    chat(
        "harmless fields",
        is_plain_chat,
        **{"metadata": {"a": "b"}, "user": "u", "store": False, "service_tier": "auto"},
        **{"response_format": {"type": "text"}, "tools": [], "tool_choice": "none"},
    ),
    chat("flex", lambda a: text(a), service_tier="flex"),
    chat(
        "a system message",
        lambda a: a.usage.prompt_tokens > 5,
        messages=[{"role": "system", "content": "Be brief."}, *HELLO],
    ),
    chat(
        "a developer message",
        lambda a: a.usage.prompt_tokens > 5,
        messages=[{"role": "developer", "content": "Be brief."}, *HELLO],
    ),
    chat(
        "content in parts",
        lambda a: len(text(a)) > 3,
        messages=[{"role": "user", "content": [{"type": "text", "text": "Hello!"}]}],
    ),
    chat(
        "several turns",
        lambda a: len(text(a)) > 3,
        messages=[*HELLO, {"role": "assistant", "content": "Hi."}, *HELLO],
    ),
    chat(
        "special text stays text",
        lambda a: a.usage.prompt_tokens > 12,
        messages=[{"role": "user", "content": "<|assistant|></s><|user|>"}],
    ),
]
CASES = COMPLETIONS + CHATS
# Of the package's own arguments; the rest are this server's extras.
EXTRAS = {
    "top_k",
    "min_p",
    "repetition_penalty",
    "ignore_eos",
    "min_tokens",
    "stop_token_ids",
    "include_stop_str_in_output",
    "allowed_token_ids",
    "bad_words_token_ids",
    "priority",
    "prompt_logprobs",
}


def arguments(body: Body) -> Body:
    own = {key: value for key, value in body.items() if key not in EXTRAS}
    extra = {key: value for key, value in body.items() if key in EXTRAS}
    return own | ({"extra_body": extra} if extra else {})


def ask(client: OpenAI, case: Case, **more: Any) -> Any:
    endpoint = client.chat.completions if case.is_chat else client.completions
    return endpoint.create(**arguments(case.asked), **more)


async def ask_async(client: AsyncOpenAI, case: Case, **more: Any) -> Any:
    endpoint = client.chat.completions if case.is_chat else client.completions
    return await endpoint.create(**arguments(case.asked), **more)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_whole_and_streamed(client: OpenAI, async_client: AsyncOpenAI, case: Case) -> None:
    """Whole by the one client, streamed by the other: the same."""
    whole = ask(client, case)
    assert case.truth(whole), whole
    # vLLM does not tell a prompt's values in streams either.
    if "prompt_logprobs" not in case.body:
        await streamed_is_the_same(async_client, case, whole)


@pytest.mark.parametrize("case", [COMPLETIONS[0], CHATS[0]], ids=lambda case: case.name)
async def test_async_whole(async_client: AsyncOpenAI, case: Case) -> None:
    answer = await ask_async(async_client, case)
    assert case.truth(answer), answer


async def streamed_is_the_same(async_client: AsyncOpenAI, case: Case, whole: Any) -> None:
    stream = await ask_async(
        async_client, case, stream=True, stream_options={"include_usage": True}
    )
    pieces: dict[int, list[str]] = {choice.index: [] for choice in whole.choices}
    ends: dict[int, str] = {}
    usage = None
    async for chunk in stream:
        assert usage is None, "usage comes last"
        usage = chunk.usage
        for choice in chunk.choices:
            assert choice.index not in ends, "nothing follows a finish reason"
            piece = choice.delta.content if case.is_chat else choice.text
            pieces[choice.index].append(piece or "")
            if choice.finish_reason is not None:
                ends[choice.index] = choice.finish_reason
    assert ["".join(pieces[index]) for index in sorted(pieces)] == texts(whole)
    assert [ends[index] for index in sorted(ends)] == [c.finish_reason for c in whole.choices]
    assert usage is not None
    assert usage.completion_tokens == count(whole)


def test_models(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "kaiten")
    assert client.models.retrieve(MODEL).id == MODEL
    assert [each.id for each in client.models.list()] == [MODEL]


async def test_models_async(async_client: AsyncOpenAI) -> None:
    assert [each.id async for each in async_client.models.list()] == [MODEL]
    assert (await async_client.models.retrieve(MODEL)).id == MODEL


def test_the_golden_request(client: OpenAI, whole_stack: WholeStack) -> None:
    answer = client.completions.create(model=MODEL, prompt="The chef", max_tokens=24, temperature=0)
    assert answer.choices[0].text == whole_stack.golden["text"]


@pytest.mark.parametrize("seed", [0, 1, 2**40])
def test_the_same_seed_says_the_same(client: OpenAI, seed: int) -> None:
    def say(seed: int) -> str:
        answer = client.completions.create(
            model=MODEL, prompt="The chef", max_tokens=24, temperature=1.2, seed=seed
        )
        return answer.choices[0].text

    assert say(seed) == say(seed) != say(seed + 1)


def test_a_text_without_what_the_tokenizer_puts_before_it(
    client: OpenAI, whole_stack: WholeStack
) -> None:
    """As vLLM has it, of completions and of /tokenize."""
    for bare, count in ((None, 3), (True, 3), (False, 2)):
        extra = {"add_special_tokens": bare}
        reply = client.completions.create(
            model=MODEL, prompt="The chef", max_tokens=1, extra_body=extra
        )
        assert reply.usage is not None
        assert reply.usage.prompt_tokens == count
        asked = {"prompt": "The chef"} | extra
        told = httpx.post(f"{whole_stack.door.http}/tokenize", json=asked, timeout=WAIT_S)
        assert told.json()["count"] == count


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_with_the_usage_so_far(client: OpenAI, n: int) -> None:
    """As vLLM has it: of each choice by itself, and of all in the end."""
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = client.completions.create(
        model=MODEL, prompt="The chef", max_tokens=6, n=n, stream=True, stream_options=options,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    *chunks, last = list(stream)
    for choice in range(n):
        counts = [
            each.usage.completion_tokens
            for each in chunks
            if each.choices[0].index == choice and each.usage is not None
        ]
        assert counts == sorted(counts)
        assert counts[-1] == 6
    assert {each.usage.prompt_tokens for each in chunks if each.usage is not None} == {3}
    assert last.usage is not None
    assert last.usage.completion_tokens == 6 * n


def test_tokens_by_their_ids(client: OpenAI) -> None:
    asked: Any = {"model": MODEL, "max_tokens": 3, "temperature": 0}
    ids: Any = {"extra_body": {"return_tokens_as_token_ids": True, "return_token_ids": True}}
    told = client.completions.create(prompt="The chef", logprobs=2, **asked, **ids).choices[0]
    names = [f"token_id:{each}" for each in (told.model_extra or {})["token_ids"]]
    assert told.logprobs is not None
    assert told.logprobs.tokens == names
    assert [
        max(each, key=lambda name: each[name]) for each in told.logprobs.top_logprobs or ()
    ] == names
    turns: Any = [{"role": "user", "content": "Hello"}]
    chat = client.chat.completions.create(
        messages=turns, logprobs=True, top_logprobs=1, **asked, **ids
    )
    content = chat.choices[0].logprobs.content if chat.choices[0].logprobs else None
    assert content
    assert all(each.token.startswith("token_id:") for each in content)
    # What the token is stays there.
    assert (
        bytes(content[0].bytes or ()).decode()
        == (chat.choices[0].message.content or "")[: len(content[0].bytes or ())]
    )
