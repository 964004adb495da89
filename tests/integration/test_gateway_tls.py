"""TLS of both ports with real clients: who is let in, who is told why not, and renewal."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from kaiten.cli.batch import BatchError, Server
from kaiten.client import TLS, AsyncClient, CertificateError, Client, UnavailableError
from kaiten.local.health import state_of
from service_kit.tls import Expiry, TlsFiles
from tests.support.answers import until as eventually
from tests.support.gateway_stack import MODEL, WAIT_S, Stack, running_stack, until
from tests.support.tls_files import EXPIRED, Authority, renew, settings_of


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def files(authority: Authority) -> TlsFiles:
    return authority.issue()


@pytest.fixture
async def stack(tmp_path: Path, redis_url: str, cell: str, files: TlsFiles) -> AsyncIterator[Stack]:
    async with running_tls(tmp_path, redis_url, cell, files) as running:
        yield running


@asynccontextmanager
async def running_tls(
    tmp_path: Path, redis_url: str, cell: str, files: TlsFiles, **changes: Any
) -> AsyncIterator[Stack]:
    changes |= settings_of(files)
    async with running_stack(tmp_path / "model", redis_url, cell, **changes) as running:
        running.says("hello")
        yield running


def grpc_address(stack: Stack, host: str = "127.0.0.1") -> str:
    return f"{host}:{stack.gateway.service.grpc_port}"


def https_url(stack: Stack) -> str:
    return f"https://127.0.0.1:{stack.gateway.service.http_port}"


async def complete(stack: Stack, tls: TLS | bool) -> str:
    async with AsyncClient(grpc_address(stack), tls=tls, resume_s=0.0) as client:
        return (await client.complete("x", timeout_s=WAIT_S)).text


async def get(stack: Stack, tls: TLS) -> int:
    async with httpx.AsyncClient(verify=tls.context(), timeout=WAIT_S) as http:
        return (await http.get(f"{https_url(stack)}/v1/models")).status_code


async def batch_refuses(stack: Stack, tls: TLS) -> str:
    """What `kaiten batch` says of it."""

    def refusal() -> str:
        server = Server(https_url(stack), None, tls)
        with closing(server), pytest.raises(BatchError) as caught:
            server.ask("GET", "/v1/models")
        return str(caught.value)

    return await asyncio.to_thread(refusal)


async def test_every_client_speaks_it(stack: Stack, authority: Authority) -> None:
    tls = authority.trusting()
    assert await complete(stack, tls) == "hello"

    def blocking() -> str:
        with Client(grpc_address(stack, "localhost"), tls=tls) as client:
            return client.complete("x", timeout_s=WAIT_S).text

    assert await asyncio.to_thread(blocking) == "hello"
    assert await state_of(grpc_address(stack), tls=tls) == "serving"
    http = DefaultAsyncHttpxClient(verify=tls.context())
    url = f"{https_url(stack)}/v1"
    # Its stub wants the client of a newer httpx, and it takes this one too.
    async with AsyncOpenAI(base_url=url, api_key="any", http_client=http) as client:
        answer = await client.completions.create(model=MODEL, prompt="x", stream=True)
        assert "".join([event.choices[0].text async for event in answer]) == "hello"


async def test_who_is_not_trusted_is_told_of_with_a_sentence(
    stack: Stack, authority: Authority, files: TlsFiles, tmp_path: Path
) -> None:
    other = Authority(tmp_path / "other").trusting()
    with pytest.raises(CertificateError, match="certificate is of an authority that is not"):
        await complete(stack, other)
    with pytest.raises(CertificateError, match="certificate is of an authority"):
        await complete(stack, True)
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        await get(stack, other)
    assert "certificate is of an authority that is not" in await batch_refuses(stack, other)
    # The gateway's own certificate may be trusted as such.
    assert await complete(stack, TLS(ca=files.cert)) == "hello"
    assert await get(stack, TLS(ca=files.cert)) == 200


@pytest.mark.parametrize(
    ("names", "says"), [((), "has expired"), (("example.org",), "is for another name")]
)
async def test_a_certificate_that_is_not_right_is_refused_by_clients(
    stack: Stack, authority: Authority, files: TlsFiles, names: tuple[str, ...], says: str
) -> None:
    """No server starts with one that has expired; one that runs may come to have it."""
    wrong = authority.issue(*names, **({} if names else EXPIRED))
    service = stack.gateway.service
    past = Expiry("--tls-cert", files.cert, EXPIRED["not_before"])
    assert service._tls is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("service_kit.tls._check_pair", lambda *_: past)
        renew(files, wrong)
        await service._tls.look()
    with pytest.raises(CertificateError, match=f"gateway's certificate {says}"):
        await complete(stack, authority.trusting())
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        await get(stack, authority.trusting())
    assert f"certificate {says}" in await batch_refuses(stack, authority.trusting())
    assert says in await state_of(grpc_address(stack), tls=authority.trusting())


async def test_clients_without_a_certificate_are_turned_away_if_one_is_asked_for(
    tmp_path: Path, redis_url: str, cell: str, authority: Authority
) -> None:
    files, stranger = authority.issue(client_ca=authority.pem), Authority(tmp_path / "stranger")
    own = authority.issue("client@example.org")
    theirs = stranger.issue("client@example.org")
    async with running_tls(tmp_path, redis_url, cell, files) as stack:
        assert await complete(stack, authority.trusting(own)) == "hello"
        assert await get(stack, authority.trusting(own)) == 200
        for tls in (authority.trusting(), authority.trusting(theirs)):
            with pytest.raises(UnavailableError, match="want a client certificate"):
                await complete(stack, tls)
            # TLS 1.3 tells it with the first answer, not in the handshake.
            with pytest.raises(httpx.TransportError):
                await get(stack, tls)
        assert stack.scheduler.submits[1:] == []


async def test_plain_clients_are_turned_away_and_hurt_nobody(
    stack: Stack, authority: Authority
) -> None:
    with pytest.raises(UnavailableError, match="may speak TLS only"):
        await complete(stack, False)
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        with pytest.raises(httpx.TransportError):
            await http.get(https_url(stack).replace("https", "http"))
    assert await complete(stack, authority.trusting()) == "hello"
    assert await get(stack, authority.trusting()) == 200


async def test_tls_towards_a_plain_port_is_told(tmp_path: Path, redis_url: str, cell: str) -> None:
    async with running_stack(tmp_path / "model", redis_url, cell) as stack:
        with pytest.raises(CertificateError, match="does not speak TLS"):
            await complete(stack, True)


async def test_who_says_nothing_is_sent_away_and_holds_up_nobody(
    tmp_path: Path, redis_url: str, cell: str, authority: Authority
) -> None:
    """With a hello of which half came, or with nothing at all; at both ports."""
    files = authority.issue()
    async with running_tls(tmp_path, redis_url, cell, files, headers_s_max=0.2) as stack:
        service = stack.gateway.service
        with ExitStack() as held:
            connections = []
            for port in (service.grpc_port, service.http_port):
                for said in (b"", b"\x16\x03\x01\x02\x00"):
                    one = held.enter_context(socket.create_connection(("127.0.0.1", port)))
                    one.sendall(said)
                    one.setblocking(False)
                    connections.append(one)

            async def is_served() -> bool:
                """Whoever is put aside before its hello is sent away, too, and asks again."""
                with suppress(httpx.TransportError, UnavailableError):
                    told = await complete(stack, authority.trusting())
                    return (await get(stack, authority.trusting()), told) == (200, "hello")
                return False

            await eventually(is_served, "others are served")
            for one in connections:
                async with asyncio.timeout(WAIT_S):
                    assert await asyncio.get_running_loop().sock_recv(one, 1) == b""


async def test_streams_go_on_through_a_renewal_and_new_connections_see_it(
    stack: Stack, authority: Authority, files: TlsFiles
) -> None:
    stack.scheduler.is_open.clear()
    service, tls = stack.gateway.service, authority.trusting()
    new = authority.issue()
    assert service._tls is not None
    http = httpx.AsyncClient(verify=tls.context(), timeout=WAIT_S)
    async with AsyncClient(grpc_address(stack), tls=tls, resume_s=0.0) as client, http:
        generation = client.generate("x", timeout_s=WAIT_S)
        over_grpc = asyncio.create_task(generation.result())
        body = {"model": MODEL, "prompt": "x", "stream": True}
        url = f"{https_url(stack)}/v1/completions"
        async with http.stream("POST", url, json=body) as answer:
            await until(lambda: len(service.generation_service.door.active) == 2, "both requests")
            before = [shown_at(service.grpc_port, tls), shown_at(service.http_port, tls)]
            seen_before = await asyncio.gather(*before)
            renew(files, new)
            await service._tls.look()
            after = [shown_at(service.grpc_port, tls), shown_at(service.http_port, tls)]
            seen_after = await asyncio.gather(*after)
            stack.scheduler.is_open.set()
            lines = [line async for line in answer.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert (await over_grpc).text == "hello"
    assert len(set(seen_before)) == len(set(seen_after)) == 1
    assert seen_before != seen_after


async def shown_at(port: int, tls: TLS) -> bytes | None:
    """The certificate a new connection is shown."""
    context = tls.context()
    context.set_alpn_protocols(["h2", "http/1.1"])
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        found: ssl.SSLObject = writer.get_extra_info("ssl_object")
        return found.getpeercert(binary_form=True)
    finally:
        writer.transport.abort()


async def test_a_socket_of_this_user_needs_no_certificate(
    tmp_path: Path, redis_url: str, cell: str, authority: Authority
) -> None:
    """By which `kaiten serve` asks its gateway whether it is well."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    files = authority.issue(client_ca=authority.pem)
    async with running_tls(tmp_path, redis_url, cell, files, grpc_socket=folder / "gateway.sock"):
        assert await state_of(f"unix:{folder}/gateway.sock") == "serving"
