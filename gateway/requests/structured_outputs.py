"""What can be said of structured outputs before anything is compiled. Pure."""

from collections.abc import Mapping
from typing import Any, Final

from kaiten.v1.common_pb2 import StructuredOutputs
from service_kit.errors import InvalidRequest

FIELD: Final = "sampling.structured_outputs"
CHOICES_MAX: Final = 4096
# With these an output could not end where it is complete.
EXCLUDED: Final = ("ignore_eos", "min_tokens")


def check(values: Mapping[str, Any], bytes_max: int) -> None:
    """InvalidRequest; `values` are the sampling fields that are set."""
    wanted: StructuredOutputs | None = values.get("structured_outputs")
    if wanted is None:
        return
    form = wanted.WhichOneof("constraint")
    if form is None or (form == "json_object" and not wanted.json_object):
        raise _wrong("must have one of json, json_object, regex, choice and grammar")
    texts = list(wanted.choice.texts) if form == "choice" else [str(getattr(wanted, form))]
    if len(texts) > CHOICES_MAX:
        raise _wrong(f"must have at most {CHOICES_MAX} choices, got {len(texts)}")
    if not all(texts) or not texts:
        raise _wrong(f"must have no empty {form}")
    if (size_bytes := sum(len(text.encode()) for text in texts)) > bytes_max:
        raise _wrong(f"must have at most {bytes_max} bytes, got {size_bytes}")
    for name in EXCLUDED:
        if values.get(name):
            raise _wrong(f"ends the output where it is complete, so {name} must not be set")


def check_end(grammar: str, has_stops: bool) -> None:
    """InvalidRequest: nothing could end an output that is complete."""
    if grammar and not has_stops:
        raise _wrong("needs a token that ends the output: this model has none; give stop_token_ids")


def _wrong(rule: str) -> InvalidRequest:
    return InvalidRequest(FIELD, rule)
