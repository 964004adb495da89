"""What responses and items tell only to whoever asks for it, by `include`."""

from typing import Final, Literal, get_args

from starlette.datastructures import QueryParams

from gateway.http.exchange import HttpExchange
from gateway.openai.operation import parameter
from service_kit.errors import InvalidRequest

LOGPROBS_INCLUDED: Final = "message.output_text.logprobs"
Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
NOT_OF_ITEMS: Final = "is not kept with items"
INCLUDING: Final = parameter("query", "include", "", "as of a response; logprobs where it has them")


def check_included(exchange: HttpExchange, *, no_logprobs: str) -> None:
    """InvalidRequest: what is not there is not left out without a word. `no_logprobs`: why there
    are none; empty: there are.
    """
    query = QueryParams(exchange.scope["query_string"])
    for name in (*query.getlist("include"), *query.getlist("include[]")):
        if name not in get_args(Included):
            rule = f"must be of {', '.join(get_args(Included))}, got {name[:64]!r}"
            raise InvalidRequest("include", rule)
        if name == LOGPROBS_INCLUDED and no_logprobs:
            raise InvalidRequest("include", f"{name!r} {no_logprobs}")
