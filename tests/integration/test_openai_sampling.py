"""What an OpenAI client says about sampling arrives at the scheduler as it was meant."""

import openai
import pytest

from tests.support.gateway_stack import MODEL, Stack


async def test_chat_and_completions_carry_every_wish(stack: Stack) -> None:
    stack.says("ok")
    client = stack.gateway.openai
    extra = {
        "repetition_penalty": 1.25,
        "allowed_token_ids": [5, 6, 7],
        "bad_words_token_ids": [[5], [6, 7]],
    }
    await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        presence_penalty=0.5,
        frequency_penalty=-0.25,
        logit_bias={"7": 5, "6": -100},
        extra_body=extra,
    )
    await client.completions.create(
        model=MODEL,
        prompt="hi",
        presence_penalty=0.5,
        frequency_penalty=-0.25,
        logit_bias={"7": 5, "6": -100},
        extra_body=extra,
    )
    assert len(stack.scheduler.submits) == 2
    for record in stack.scheduler.submits:
        row = record.sampling
        assert row.repetition_penalty == 1.25
        assert (row.presence_penalty, row.frequency_penalty) == (0.5, -0.25)
        assert [(each.token_id, each.bias) for each in row.logit_bias] == [(7, 5.0), (6, -100.0)]
        assert list(row.allowed_token_ids) == [5, 6, 7]
        assert [list(word.token_ids) for word in row.bad_words] == [[5], [6, 7]]


@pytest.mark.parametrize(
    ("wishes", "param", "says"),
    [
        ({"presence_penalty": -2.5}, "presence_penalty", r"must be a number in \[-2, 2\]"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "keys must be token ids"),
        ({"extra_body": {"bad_words_token_ids": [[1] * 33]}}, "bad_words_token_ids", "at most 32"),
        ({"extra_body": {"prompt_logprobs": 21}}, "prompt_logprobs", "in .0, 20., got 21"),
    ],
)
async def test_a_wish_that_cannot_be_granted_is_named(
    stack: Stack, wishes: dict[str, object], param: str, says: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=says) as caught:
        await stack.gateway.openai.completions.create(model=MODEL, prompt="hi", **wishes)  # type: ignore[call-overload]
    assert caught.value.param == param
    assert not stack.scheduler.submits
