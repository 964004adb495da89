"""A short run of the fuzzer at both doors of a stack of its own; `python -m tests.fuzz.run` is the
long one."""

from collections.abc import Callable
from pathlib import Path

from tests.fuzz.messages import tagged, varint
from tests.fuzz.run import METHODS, fuzz_stack
from tests.support.whole_stack import WholeStack

REQUESTS = 1000
SECONDS_MAX = 10.0
# Both doors were asked, got past their first check, and refused what was wrong.
WANTED = {"grpc OK", "grpc INVALID_ARGUMENT", "http 200", "http 400"}


def test_no_request_is_felt(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    with WholeStack(tmp_path) as stack:
        fuzz, _ = fuzz_stack(stack, REQUESTS, number=1, seconds_max=SECONDS_MAX, wanted=WANTED)
        record_property("requests", sum(fuzz.outcomes.values()))
        assert not fuzz.findings, fuzz.findings[:5]
        assert fuzz.outcomes.keys() >= WANTED, fuzz.outcomes
        stack.check()


def test_every_public_method_is_called() -> None:
    assert {method.name for method in METHODS} == {
        *("Generate", "GenerateBatch", "Attach", "Cancel", "GetRequest", "Explain"),
        *("ListModels", "Tokenize", "Detokenize"),
    }


def test_the_wire_format_is_protobufs() -> None:
    assert varint(300) == b"\xac\x02"
    assert varint(-1) == b"\xff" * 9 + b"\x01"
    assert tagged(1, b"abc") == b"\x0a\x03abc"
