"""What the last message of a response says of where the time went."""

import pytest

from gateway.openai.usage import Timing, ends_of
from kaiten.v1.inference_service_pb2 import Done, Timings, Usage


def done(output_tokens: int, decode_us: int) -> Done:
    usage = Usage(prompt_tokens=3, output_tokens=output_tokens)
    return Done(usage=usage, timings=Timings(decode_us=decode_us))


@pytest.mark.parametrize(
    ("some", "tokens_per_s"),
    [
        ([done(2, 10_000)], 100),
        ([done(11, 100_000)], 100),
        ([done(11, 100_000), done(6, 50_000)], 150),
        ([done(1, 500)], None),
        ([done(0, 0)], None),
    ],
)
def test_tokens_per_second_are_of_those_behind_the_first(
    some: list[Done], tokens_per_s: float | None
) -> None:
    """Which came when decoding began."""
    timing = ends_of(some)["kaiten"]
    assert isinstance(timing, Timing)
    assert timing.tokens_per_s == tokens_per_s
