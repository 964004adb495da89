"""Whoever watches, or reads archives, does so for as long as the key is one of an operator."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.cell.operators import Told
from gateway.grpc.operators import OperatorServicer
from gateway.http.exchange import HttpExchange
from gateway.openai.operators.watch import watch
from gateway.tenants import Keyring, Tenant, WrongKey, digest
from kaiten.v1.scheduler_service_pb2 import ReadArchiveRequest
from kaiten.v1.watch_pb2 import WatchRequest, WatchResponse
from service_kit.errors import Forbidden, KaitenError

KEY, OPERATOR = "Bearer key", Tenant(name="acme", is_operator=True)
Keys = list[tuple[bytes, Tenant]]
CHANGES: list[tuple[Keys, type[KaitenError]]] = [
    ([], WrongKey),
    ([(digest("key"), Tenant(name="acme"))], Forbidden),
]


class PlayedOperators:
    """Two responses; before the second one the keys are others."""

    def __init__(self, change: Callable[[], None]) -> None:
        self._change = change

    async def watch(self, request: WatchRequest) -> AsyncGenerator[Told, None]:
        yield Told(WatchResponse(is_snapshot=True).SerializeToString())
        self._change()
        yield Told(WatchResponse().SerializeToString())

    async def read_archive(self, request: ReadArchiveRequest) -> AsyncGenerator[list[Any], None]:
        yield []
        self._change()
        yield []


class PlayedExchange(HttpExchange):
    """Its events are kept."""

    def __init__(self, keyring: Keyring) -> None:
        key_owner = partial(keyring.tenant_of, KEY)
        state = {"tenant": key_owner(), "key_owner": key_owner}
        self.scope = {"query_string": b"", "headers": [], "method": "GET", "state": state}
        self.events: list[bytes] = []

    async def start_events(self, *_: Any, **__: Any) -> None:
        pass

    @asynccontextmanager
    async def pinged(self, silent_s_max: float) -> AsyncIterator[None]:
        yield

    async def send_events(self, raw: bytes) -> None:
        self.events.append(raw)


@pytest.mark.parametrize(("keys", "error"), CHANGES)
async def test_over_http(keys: Keys, error: type[KaitenError]) -> None:
    keyring = Keyring([(digest("key"), OPERATOR)])
    api: Any = SimpleNamespace(operators=PlayedOperators(partial(keyring.replace, keys, ())))
    exchange = PlayedExchange(keyring)
    with pytest.raises(error):
        await watch(api, exchange, None)
    assert len(exchange.events) == 1


@pytest.mark.parametrize(
    ("method", "asked"), [("Watch", WatchRequest()), ("ReadArchive", ReadArchiveRequest())]
)
@pytest.mark.parametrize(("keys", "error"), CHANGES)
async def test_over_grpc(keys: Keys, error: type[KaitenError], method: str, asked: Any) -> None:
    keyring = Keyring([(digest("key"), OPERATOR)])
    operators: Any = PlayedOperators(partial(keyring.replace, keys, ()))
    context = SimpleNamespace(
        invocation_metadata=lambda: [("authorization", KEY)], peer=lambda: "ipv4:127.0.0.1:1"
    )
    responses = getattr(OperatorServicer(operators, keyring), method)(asked, context)
    await anext(responses)
    with pytest.raises(error):
        await anext(responses)
