"""One error, two codes: the table knows every class."""

import json
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from google.rpc.status_pb2 import Status
from redis import exceptions as redis

from gateway.children.pool import WorkRefused
from gateway.grpc.convert import error_to_proto
from gateway.http import errors as http
from gateway.http.json_reply import to_json
from gateway.openai.conversations.stored import Contended
from gateway.requests.validation import FarTooLong, PromptTooLong, TextTooLong, TooMany
from gateway.tenants import WrongKey
from gateway.text.template_process import WORK
from ledger import DamagedLedger, Fenced, StoreLost
from ledger.servers.refusals import NotLetIn, translated
from service_kit import errors, grpc_errors

EXAMPLES = [
    errors.InvalidRequest("sampling.top_p", "must be more"),
    errors.TooLong("stop", 1, 2),
    errors.SeveralInvalid([errors.InvalidRequest("n", "bad"), errors.TooLong("stop", 1, 2)]),
    TooMany("text", 1, 2, "bytes"),
    PromptTooLong("text", 1, 2),
    TextTooLong("text", 1, 2),
    FarTooLong("text", 1, 2),
    WorkRefused(WORK, {"error": "says: no", "at": 1}),
    errors.NotFound("request 'x'"),
    errors.AlreadyExists("request 'x'"),
    errors.Overloaded("full", 2.5, 7),
    errors.DeadlineExceeded("decode"),
    errors.Cancelled(),
    errors.Unavailable("away", 0.2),
    errors.Unserved("no worker can do it"),
    errors.OutOfOrder("stale"),
    errors.StaleLeader("stale", 7),
    errors.NotLeader(""),
    errors.Unauthenticated("no key"),
    WrongKey("no such key"),
    errors.Forbidden("for operators"),
    errors.DataLoss("other tokens"),
    errors.ConfigError("wrong"),
    errors.Failed("row error"),
    errors.Unsatisfiable("no token"),
    StoreLost(),
    Fenced("old"),
    DamagedLedger("hole"),
    Contended("conv_1"),
    NotLetIn("no such user"),
]


def every_class(root: type[errors.KaitenError]) -> set[type[errors.KaitenError]]:
    return {root}.union(*(every_class(kind) for kind in root.__subclasses__()))


async def test_where_the_store_is_and_as_whom_we_ask_it_no_client_is_told() -> None:
    told: list[str] = []

    async def abort(_code: Any, text: str, trailers: Any) -> None:
        told.extend((text, Status.FromString(dict(trailers)["grpc-status-details-bin"]).message))
        raise grpc.aio.AbortError

    for secret, error in (
        ("10.0.0.7", redis.ConnectionError("Error 111 connecting to 10.0.0.7:6379.")),
        ("10.0.0.7", redis.ResponseError("MOVED 3999 10.0.0.7:6379")),
        ("kaiten-1", redis.NoPermissionError("User kaiten-1 has no permissions to run 'evalsha'")),
    ):
        found = translated(error)
        assert isinstance(found, errors.Unavailable)
        assert secret in found.reason
        told += [http.body_of(found).error.message, error_to_proto(found).message]
        with pytest.raises(grpc.aio.AbortError):
            await grpc_errors.abort(cast(Any, SimpleNamespace(abort=abort)), found)
    assert set(told) == {
        "unavailable: the ledger cannot be reached",
        "unavailable: the ledger is not ready",
        "unavailable: the ledger's user lacks a permission",
    }


def test_every_error_is_an_example() -> None:
    ours = ("service_kit.", "gateway.", "ledger.")
    found = {kind for kind in every_class(errors.KaitenError) if kind.__module__.startswith(ours)}
    # The root is never raised; the other one is HTTP's own.
    made_by_hand = {errors.KaitenError, http.HttpError}
    assert found - made_by_hand == {type(example) for example in EXAMPLES}


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_the_two_codes_agree_on_who_must_act(error: errors.KaitenError) -> None:
    row, code = http.row_of(error), grpc_errors.code_of(error)
    is_client_at_fault = code.name in {
        "INVALID_ARGUMENT",
        "NOT_FOUND",
        "ALREADY_EXISTS",
        "UNAUTHENTICATED",
        "PERMISSION_DENIED",
        "RESOURCE_EXHAUSTED",
        "CANCELLED",
        "DATA_LOSS",
    }
    if code.name != "FAILED_PRECONDITION":
        assert (400 <= row.status < 500) is is_client_at_fault
    body = json.loads(to_json(http.body_of(error)))["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert body["message"]
    assert body["type"] in http.TYPES
    assert body["code"] in {*http.CODES, None}


def test_words_of_the_client() -> None:
    error = http.body_of(errors.InvalidRequest("sampling.top_p", "must be more")).error
    assert (error.param, error.message) == ("top_p", "top_p: must be more")
    error = http.body_of(PromptTooLong("token_ids.ids", 7, 8)).error
    assert (error.param, error.code) == ("prompt", "context_length_exceeded")
    assert "8 tokens; at most 7" in error.message
    assert http.body_of(errors.NotFound("model 'x'")).error.code == "model_not_found"


def test_errors_that_only_http_has() -> None:
    assert http.row_of(http.HttpError(413, "too long", "too_long")).status == 413


def test_retry_after_is_whole_seconds_and_never_zero() -> None:
    assert http.headers_of(errors.Unavailable("away", 0.2))["retry-after"] == "1"
    assert http.headers_of(errors.Overloaded("full", 2.6))["retry-after"] == "3"
    assert http.headers_of(errors.Overloaded("full", 2.6))["x-should-retry"] == "true"
    assert http.headers_of(errors.Cancelled()) == {}
