"""What a response took: OpenAI's usage, and where the time went."""

from collections.abc import Sequence
from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from kaiten.v1.inference_service_pb2 import Done

Count = Annotated[int, Meta(ge=0)]


class PromptTokensDetails(Struct):
    cached_tokens: Count


class CompletionTokensDetails(Struct):
    reasoning_tokens: Count


class Usage(Struct):
    """Sums over the prompts of one HTTP request; of one choice so far, they have no details."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class Timing(Struct, kw_only=True):
    """Where the time went. OpenAI has no word for it, so it stands under our name."""

    queue_ms: float
    prefill_ms: float
    decode_ms: float
    tokens_per_s: float | None
    preemptions: Count


def ends_of(done: Sequence[Done]) -> dict[str, Usage | Timing]:
    """What the last message of a response says, from what each of its prompts took."""
    prompt = sum(each.usage.prompt_tokens for each in done)
    output = sum(each.usage.output_tokens for each in done)
    cached = PromptTokensDetails(sum(each.usage.cached_tokens for each in done))
    details = CompletionTokensDetails(sum(each.usage.reasoning_tokens for each in done))
    timings = [each.timings for each in done]
    # They run side by side: the longest is what the client waited for.
    decode_us = max(each.decode_us for each in timings)
    # Behind the first of each prompt, which had come when its decoding began.
    decoded = sum(max(0, each.usage.output_tokens - 1) for each in done)
    timing = Timing(
        queue_ms=max(each.queue_us for each in timings) / 1000,
        prefill_ms=max(each.prefill_us for each in timings) / 1000,
        decode_ms=decode_us / 1000,
        tokens_per_s=round(decoded / decode_us * 1e6, 3) if decoded and decode_us else None,
        preemptions=sum(each.preemptions for each in timings),
    )
    return {"usage": Usage(prompt, output, prompt + output, cached, details), "kaiten": timing}
