"""/v1/models: the one model."""

from typing import Final, Literal

from msgspec import Struct

from gateway.http.exchange import HttpExchange
from gateway.openai.operation import LOOKS, Api, Operation, parameter
from gateway.openai.usage import Count
from service_kit.errors import NotFound


class Model(Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: Count
    owned_by: str = "kaiten"
    max_model_len: Count


class Models(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


async def list_models(api: Api, exchange: HttpExchange, _body: None) -> None:
    """The model while it is served: scripts wait for this one rather than for /ready."""
    await exchange.send_json(200, Models(data=[_model(api)]))


async def get_model(api: Api, exchange: HttpExchange, _body: None) -> None:
    name = exchange.path["name"]
    if not name:
        raise NotFound("model ''", "the path is /v1/models")
    if name != api.generation_service.card.name:
        raise NotFound(f"model {name[:128]!r}")
    await exchange.send_json(200, _model(api))


def _model(api: Api) -> Model:
    api.generation_service.readiness.check()
    context = api.generation_service.limits.context_tokens_max
    return Model(id=api.generation_service.card.name, created=api.started_s, max_model_len=context)


NAME: Final = parameter("path", "name", "", "slashes in it are taken as they are")
OPERATIONS: Final = (
    Operation("GET", "/v1/models", "listModels", list_models, LOOKS, (Models,)),
    Operation("GET", "/v1/models/{name:path}", "getModel", get_model, LOOKS, (Model,), (NAME,)),
)
