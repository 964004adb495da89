"""What a response took: OpenAI's usage, and where the time went."""

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

from kaiten.v1.inference_service_pb2 import Done

Count = Annotated[int, Meta(ge=0)]


class PromptTokensDetails(Struct):
    cached_tokens: Count


class Usage(Struct, kw_only=True):
    """Sums over the prompts of one HTTP request."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails


class Timing(Struct, kw_only=True):
    """Where the time went. OpenAI has no word for it, so it stands under our name."""

    queue_ms: float
    prefill_ms: float
    decode_ms: float
    tokens_per_s: float | None
    preemptions: Count


def usage_of(done: Sequence[Done]) -> Usage:
    """`done`: of each prompt."""
    prompt = sum(each.usage.prompt_tokens for each in done)
    output = sum(each.usage.output_tokens for each in done)
    cached = sum(each.usage.cached_tokens for each in done)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=output,
        total_tokens=prompt + output,
        prompt_tokens_details=PromptTokensDetails(cached),
    )


def timing_of(done: Sequence[Done]) -> Timing:
    """Prompts run side by side: the longest is what the client waited for."""
    timings = [each.timings for each in done]
    output = sum(each.usage.output_tokens for each in done)
    decode_us = max((each.decode_us for each in timings), default=0)
    return Timing(
        queue_ms=max((each.queue_us for each in timings), default=0) / 1000,
        prefill_ms=max((each.prefill_us for each in timings), default=0) / 1000,
        decode_ms=decode_us / 1000,
        tokens_per_s=round(output / decode_us * 1e6, 3) if decode_us else None,
        preemptions=sum(each.preemptions for each in timings),
    )
