"""What load balancers, Prometheus and people without a key may ask."""

from importlib.metadata import version
from typing import Final, Literal

from msgspec import Struct

from gateway.http.exchange import HttpExchange
from gateway.openai.operation import OPEN, Api, Operation

NOT_YET: Final = {"retry-after": "1", "x-should-retry": "true"}


class Health(Struct):
    status: Literal["ok"] = "ok"


class Serving(Struct):
    status: Literal["serving"] = "serving"


class NotServing(Struct, kw_only=True):
    """Not now."""

    status: Literal["not_serving"] = "not_serving"
    reason: str


class Version(Struct):
    version: str


async def health(_api: Api, exchange: HttpExchange, _body: None) -> None:
    """Alive: this loop turns. Whether requests can be served, /ready tells."""
    await exchange.send_json(200, Health())


async def ready(api: Api, exchange: HttpExchange, _body: None) -> None:
    problem = api.generation_service.readiness.problem
    if problem:
        await exchange.send_json(503, NotServing(reason=problem), NOT_YET)
    else:
        await exchange.send_json(200, Serving())


async def metrics(api: Api, exchange: HttpExchange, _body: None) -> None:
    """For Prometheus; takes a millisecond, which is why it needs no thread."""
    page = api.metrics.page(exchange.header("accept"))
    await exchange.send(200, page.body, page.content_type)


async def get_version(_api: Api, exchange: HttpExchange, _body: None) -> None:
    await exchange.send_json(200, Version(version("kaiten")))


TEXTS: Final = ("text/plain", "application/openmetrics-text")
LATER: Final = {503: NotServing}
OPERATIONS: Final = (
    Operation("GET", "/health", "health", health, OPEN, (Health,)),
    Operation("GET", "/livez", "livez", health, OPEN, (Health,)),
    Operation("GET", "/ready", "ready", ready, OPEN, (Serving,), others=LATER),
    Operation("GET", "/readyz", "readyz", ready, OPEN, (Serving,), others=LATER),
    Operation("GET", "/metrics", "metrics", metrics, (*OPEN, 503), TEXTS),
    Operation("GET", "/version", "version", get_version, OPEN, (Version,)),
)
