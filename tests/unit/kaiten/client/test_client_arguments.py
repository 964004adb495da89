"""What a client is made with and asked for: what is wrong is named before anything is sent."""

import math
from typing import Any

import pytest

from kaiten.client import AsyncClient, Client, InvalidRequestError, PreconditionError
from service_kit.grpc_server import bind, create_server

NOBODY = "127.0.0.1:1"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"address": ""}, "the address is empty: it must be host:port"),
        ({"address": None}, "address: must be host:port, got None"),
        ({"address": "http://127.0.0.1:8000"}, "address: must be host:port of the gRPC API"),
        ({"address": "127.0.0.1:99999"}, "a port must be from 1 to 65535, got 99999"),
        ({"address": "a:1,b:2"}, "a:1,b:2: several are written ipv4:HOST:PORT,HOST:PORT"),
        ({"resume_s": math.nan}, "resume_s: must be seconds, 0 or more, got nan"),
        ({"resume_s": "1"}, "resume_s: must be seconds, 0 or more, got '1'"),
        ({"overload_s": -1}, "overload_s: must be seconds, 0 or more, got -1"),
        ({"api_key": b"kt-a"}, "api_key: must be printable ASCII"),
        ({"metadata": {"a": "b"}}, "metadata: must be pairs .*, which 0 is not"),
        ({"metadata": [("a", "b"), ("c", 1)]}, "metadata: .*, which 1 is not"),
        ({"metadata": [("A", "b")]}, "a name in small letters"),
        ({"metadata": [("a", "é")]}, "printable ASCII"),
        ({"metadata": [("a-bin", "b")]}, "bytes, of a name in -bin"),
    ],
)
def test_what_no_client_is_made_with(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Client(**{"address": NOBODY} | options)


@pytest.mark.parametrize(
    "address", [NOBODY, "ipv4:127.0.0.1:1,127.0.0.1:2", "dns:///a.example:1", "[::1]:1", "unix:/x"]
)
def test_addresses_as_grpc_has_them(address: str) -> None:
    Client(address, metadata=[("a-b", "c"), ("d-bin", b"\0")], overload_s=math.inf).close()  # type: ignore[list-item]


def test_a_client_for_asyncio_is_made_where_its_loop_runs() -> None:
    """In another none of its calls would work, for a reason that gRPC does not tell."""
    with pytest.raises(RuntimeError, match="make an AsyncClient inside its running event loop"):
        AsyncClient(NOBODY)


@pytest.mark.parametrize("request_id", [None, 5, "\ud800"])
def test_an_id_that_is_no_text_is_named(request_id: Any) -> None:
    with Client(NOBODY) as client:
        for ask in (client.wait, client.get, client.cancel):
            with pytest.raises(InvalidRequestError, match="request_id: cannot be ") as caught:
                ask(request_id)
            assert caught.value.fields == ("request_id",)
        with pytest.raises(InvalidRequestError, match=r"positions: cannot be \[-1\]"):
            client.attach("r", positions=[-1])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (CHAT | {"tools": ["a"]}, "tools.0: cannot be 'a': a tool is a mapping, with name"),
        (CHAT | {"tools": [{"name": "a"}, {"nom": "b"}]}, 'tools.1: .* no "nom" field'),
        (CHAT | {"tools": [{"name": 1}]}, "tools.0: .* name must be a text"),
        (CHAT | {"tools": 5}, "tools: cannot be 5"),
        (CHAT | {"tool_choice": 5}, "tool_choice: cannot be 5: it must be auto, none, required"),
        (CHAT | {"tool_choice": {}}, "tool_choice: cannot be {}: it must be auto"),
        (CHAT | {"parallel_tool_calls": "no"}, "parallel_tool_calls: cannot be 'no'"),
        (
            CHAT | {"structured_outputs": {"json": {}, "regex": "a"}},
            "structured_outputs: .* must have one of 'json' and 'regex'",
        ),
        (CHAT | {"structured_outputs": {"choice": "ab"}}, "choice must be several texts"),
        (CHAT | {"structured_outputs": "a"}, "structured_outputs: .* must be a mapping"),
    ],
)
def test_tools_and_forms_that_are_none_are_named(options: dict[str, Any], said: str) -> None:
    with Client(NOBODY) as client, pytest.raises(InvalidRequestError, match=said):
        client.generate(**options)


async def test_who_is_no_gateway_is_told_apart() -> None:
    server = create_server()
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    async with AsyncClient(f"127.0.0.1:{port}") as client:
        with pytest.raises(PreconditionError, match="who answers at this address is no gateway"):
            await client.models()
    await server.stop(0)
