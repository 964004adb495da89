"""What no worker of the cell can do is refused before it is accepted, over both doors."""

from typing import Any

import grpc
import httpx
import pytest
from google.rpc.error_details_pb2 import BadRequest

from kaiten.v1.common_pb2 import (
    FEATURE_LOGITS_PROCESSORS,
    FEATURE_LOGPROBS,
    FEATURE_PROMPT_LOGPROBS,
    FEATURE_STRUCTURED_OUTPUTS,
    Feature,
    SamplingParams,
    StructuredOutputs,
    TokenBias,
)
from tests.support.gateway_stack import MODEL, Stack, detail, until

WORDS = {
    FEATURE_LOGPROBS: "no worker of this cell can give log-probabilities",
    FEATURE_PROMPT_LOGPROBS: "no worker of this cell can give log-probabilities of a prompt",
    FEATURE_LOGITS_PROCESSORS: "no worker of this cell can change logits before it samples",
    FEATURE_STRUCTURED_OUTPUTS: "no worker of this cell can keep to a grammar",
}
# What asks for it: field, over gRPC, over HTTP.
ASKS: list[tuple[Feature, str, dict[str, Any], dict[str, Any]]] = [
    (FEATURE_LOGPROBS, "logprobs", {"logprobs": 0}, {"logprobs": 0}),
    (FEATURE_PROMPT_LOGPROBS, "prompt_logprobs", {"prompt_logprobs": 1}, {"prompt_logprobs": 1}),
    (
        FEATURE_LOGITS_PROCESSORS,
        "repetition_penalty",
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 1.5},
    ),
    (
        FEATURE_LOGITS_PROCESSORS,
        "logit_bias",
        {"logit_bias": [TokenBias(token_id=1, bias=1)]},
        {"logit_bias": {"1": 1}},
    ),
    (
        FEATURE_STRUCTURED_OUTPUTS,
        "structured_outputs",
        {"structured_outputs": StructuredOutputs(regex="a")},
        {"structured_outputs": {"regex": "a"}},
    ),
]


@pytest.fixture
def stack_options() -> dict[str, Any]:
    return {"features": ()}


@pytest.mark.parametrize(("feature", "field", "sampling", "body"), ASKS)
async def test_it_is_refused_by_field_until_a_worker_can(
    stack: Stack,
    http: httpx.AsyncClient,
    feature: Feature,
    field: str,
    sampling: dict[str, Any],
    body: dict[str, Any],
) -> None:
    params = SamplingParams(max_tokens=2, **sampling)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.generate(text="x", sampling=params)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    (violation,) = detail(caught.value, BadRequest).field_violations
    assert violation.field == f"sampling.{field}"
    assert WORDS[feature] in (caught.value.details() or "")

    asked = {"model": MODEL, "prompt": "x", "max_tokens": 2, **body}
    reply = await http.post("/v1/completions", json=asked)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["param"], error["type"]) == (field, "invalid_request_error")
    assert WORDS[feature] in error["message"]
    assert stack.scheduler.submits == [], "nothing was accepted"

    plain = await stack.generate(text="x", sampling=SamplingParams(max_tokens=2))
    assert plain[-1].HasField("done")
    stack.scheduler.cell.model.capabilities.features.append(feature)
    service = stack.gateway.service.generation_service
    await until(lambda: feature in service.limits.features, "the cell's description")
    await stack.generate(text="x", sampling=params)
    assert len(stack.scheduler.submits) == 2
