"""The error table is total, and its details say what a client's program needs."""

from collections.abc import Iterator

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, QuotaFailure, RetryInfo
from google.rpc.status_pb2 import Status

from service_kit import errors, grpc_errors
from service_kit.error_table import TABLE, retry_after_s


def every_error(root: type[errors.KaitenError]) -> Iterator[type[errors.KaitenError]]:
    for kind in root.__subclasses__():
        yield kind
        yield from every_error(kind)


EXAMPLES: dict[type[errors.KaitenError], tuple[errors.KaitenError, grpc.StatusCode, str]] = {
    errors.InvalidRequest: (
        errors.InvalidRequest("n", "must be at least 1"),
        grpc.StatusCode.INVALID_ARGUMENT,
        "n: must be at least 1",
    ),
    errors.TooLong: (
        errors.TooLong("prompt", 8, 9),
        grpc.StatusCode.INVALID_ARGUMENT,
        "prompt: must be at most 8, got 9",
    ),
    errors.NotFound: (errors.NotFound("x"), grpc.StatusCode.NOT_FOUND, "x not found"),
    errors.AlreadyExists: (
        errors.AlreadyExists("request 7"),
        grpc.StatusCode.ALREADY_EXISTS,
        "request 7 already exists with another content",
    ),
    errors.Overloaded: (
        errors.Overloaded("queue full", 2.5, limit=10),
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "overloaded: queue full (limit 10); retry in 2.5 s",
    ),
    errors.DeadlineExceeded: (
        errors.DeadlineExceeded("queued"),
        grpc.StatusCode.DEADLINE_EXCEEDED,
        "deadline exceeded in phase 'queued'",
    ),
    errors.Cancelled: (errors.Cancelled(), grpc.StatusCode.CANCELLED, "cancelled"),
    errors.Unavailable: (
        errors.Unavailable("redis is away"),
        grpc.StatusCode.UNAVAILABLE,
        "unavailable: redis is away",
    ),
    errors.StaleLeader: (
        errors.StaleLeader("stale", 7),
        grpc.StatusCode.FAILED_PRECONDITION,
        "stale",
    ),
    errors.OutOfOrder: (errors.OutOfOrder("gap"), grpc.StatusCode.FAILED_PRECONDITION, "gap"),
    errors.NotLeader: (
        errors.NotLeader("10.0.0.1:50052"),
        grpc.StatusCode.FAILED_PRECONDITION,
        "not the leader; the leader is 10.0.0.1:50052",
    ),
    errors.Unauthenticated: (
        errors.Unauthenticated("no key"),
        grpc.StatusCode.UNAUTHENTICATED,
        "no key",
    ),
    errors.Unserved: (
        errors.Unserved("no worker can do it"),
        grpc.StatusCode.UNAVAILABLE,
        "unavailable: no worker can do it",
    ),
    errors.Forbidden: (
        errors.Forbidden("for operators"),
        grpc.StatusCode.PERMISSION_DENIED,
        "for operators",
    ),
    errors.SeveralInvalid: (
        errors.SeveralInvalid([errors.InvalidRequest("n", "bad"), errors.TooLong("stop", 1, 2)]),
        grpc.StatusCode.INVALID_ARGUMENT,
        "n: bad; stop: must be at most 1, got 2",
    ),
    errors.DataLoss: (errors.DataLoss("other"), grpc.StatusCode.DATA_LOSS, "other"),
    errors.Failed: (errors.Failed("row error"), grpc.StatusCode.INTERNAL, "row error"),
    errors.Unsatisfiable: (
        errors.Unsatisfiable("no token"),
        grpc.StatusCode.INVALID_ARGUMENT,
        "the output cannot go on as it was asked for: no token",
    ),
    errors.ConfigError: (
        errors.ConfigError("fix it"),
        grpc.StatusCode.FAILED_PRECONDITION,
        "fix it",
    ),
}


def details(error: errors.KaitenError) -> dict[str, Message]:
    trailers = dict(grpc_errors.trailers_of(error))
    raw = trailers["grpc-status-details-bin"]
    assert isinstance(raw, bytes)
    status = Status.FromString(raw)
    assert status.code == grpc_errors.code_of(error).value[0]
    unpacked: dict[str, Message] = {}
    for packed in status.details:
        for kind in (BadRequest, ErrorInfo, QuotaFailure, RetryInfo):
            if packed.Is(kind.DESCRIPTOR):
                unpacked[kind.__name__] = message = kind()
                packed.Unpack(message)
    return unpacked


def test_every_error_has_a_row() -> None:
    """Walks the subclasses that exist now. The gateway's own have a test of their own."""
    kinds = [k for k in every_error(errors.KaitenError) if not k.__module__.startswith("gateway.")]
    assert len(kinds) >= len(EXAMPLES)
    for kind in kinds:
        assert any(base in TABLE for base in kind.__mro__), f"{kind} has no row"


def test_the_root_itself_has_no_row_so_a_new_error_cannot_hide() -> None:
    assert errors.KaitenError not in TABLE
    with pytest.raises(AssertionError, match="KaitenError has no row"):
        grpc_errors.code_of(errors.KaitenError("x"))


@pytest.mark.parametrize("kind", EXAMPLES, ids=lambda kind: kind.__name__)
def test_code_and_sentence(kind: type[errors.KaitenError]) -> None:
    error, code, sentence = EXAMPLES[kind]
    assert grpc_errors.code_of(error) is code
    assert str(error) == sentence
    info = details(error)["ErrorInfo"]
    assert isinstance(info, ErrorInfo)
    assert (info.reason, info.domain) == (kind.__name__, "kaiten")


def test_every_documented_error_is_in_the_examples() -> None:
    own = {kind for kind in every_error(errors.KaitenError) if kind.__module__ == errors.__name__}
    assert own == EXAMPLES.keys()


def test_a_bad_field_is_named() -> None:
    bad = details(errors.TooLong("prompt", 8, 9))["BadRequest"]
    assert isinstance(bad, BadRequest)
    assert [v.field for v in bad.field_violations] == ["prompt"]
    info = details(errors.TooLong("prompt", 8, 9))["ErrorInfo"]
    assert isinstance(info, ErrorInfo)
    assert dict(info.metadata) == {"limit": "8", "got": "9"}


def test_every_wrong_field_is_named_within_the_trailers_room() -> None:
    wrong = [errors.InvalidRequest(f"field_{index}", "é" * 2000) for index in range(40)]
    bad = details(errors.SeveralInvalid(wrong))["BadRequest"]
    assert isinstance(bad, BadRequest)
    assert [v.field for v in bad.field_violations] == [f"field_{index}" for index in range(16)]
    trailer = dict(grpc_errors.trailers_of(errors.SeveralInvalid(wrong)))
    assert len(trailer["grpc-status-details-bin"]) < 7_000


def test_an_overload_says_whose_bound_it_was() -> None:
    error = errors.Overloaded("too many live requests", 1.0, 10, live=9, subject="tenant")
    assert str(error) == "overloaded: too many live requests (live 9, limit 10); retry in 1 s"
    found = details(error)
    quota, info = found["QuotaFailure"], found["ErrorInfo"]
    assert isinstance(quota, QuotaFailure)
    assert isinstance(info, ErrorInfo)
    assert [(v.subject, v.description) for v in quota.violations] == [
        ("tenant", "overloaded: too many live requests (live 9, limit 10); retry in 1 s")
    ]
    assert dict(info.metadata) == {"limit": "10", "live": "9", "subject": "tenant"}


@pytest.mark.parametrize("error", [errors.Overloaded("full", 2.5), errors.Unavailable("away", 2.5)])
def test_retryables_say_when(error: errors.KaitenError) -> None:
    retry = details(error)["RetryInfo"]
    assert isinstance(retry, RetryInfo)
    assert (retry.retry_delay.seconds, retry.retry_delay.nanos) == (2, 500_000_000)
    assert ("grpc-retry-pushback-ms", "2500") in grpc_errors.trailers_of(error)


@pytest.mark.parametrize("error", [errors.InvalidRequest("n", "no"), errors.Cancelled()])
def test_others_do_not_invite_a_retry(error: errors.KaitenError) -> None:
    assert "RetryInfo" not in details(error)
    assert ("grpc-retry-pushback-ms", "-1") in grpc_errors.trailers_of(error)


def test_who_says_when_is_who_is_asked_again() -> None:
    for error, _, _ in EXAMPLES.values():
        assert retry_after_s(error) == getattr(error, "retry_after_s", None)


def test_a_subclass_defined_elsewhere_inherits_its_row() -> None:
    class StoreGone(errors.Unavailable):
        pass

    assert grpc_errors.code_of(StoreGone("x")) is grpc.StatusCode.UNAVAILABLE


def test_long_text_is_cut_to_fit_the_trailers() -> None:
    error = errors.InvalidRequest("stop", "x" * 100_000)
    assert sum(len(value) for _, value in grpc_errors.trailers_of(error)) < 4096
