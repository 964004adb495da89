"""Parts prove themselves to each other: by a credential, by certificates, by a private socket."""

import asyncio
import dataclasses
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from kaiten.client import TLS
from kaiten.local.health import state_of
from kaiten.local.ports import HeldPort
from service_kit import grpc_server
from service_kit.errors import ConfigError, Unauthenticated
from service_kit.peers import (
    ANSWER,
    SKEW_S_MAX,
    Bound,
    Credential,
    Guard,
    PartSettings,
    Peers,
    Proof,
    make_credential,
)
from service_kit.tls import Certificates
from tests.support.tls_files import EARLY, EXPIRED, RECENT, Authority, encrypted

WAIT_S = 30.0
OURS, THEIRS = "0" * 40, "1" * 40
NOW_MS = 1_800_000_000_000
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED


def credential_file(folder: Path, *lines: str, mode: int = 0o600) -> Path:
    path = folder / f"credential-{lines[0][:1]}"
    path.write_text("\n".join(lines) + "\n")
    path.chmod(mode)
    return path


def sharing(folder: Path, *lines: str) -> Peers:
    return Peers(Credential(credential_file(folder, *lines)))


def sent(key: str = OURS, at_ms: int = NOW_MS) -> str:
    """The proof of a call."""
    return Proof(key.encode(), at_ms).metadata[0][1]


# The credential


def test_a_proof_is_taken_once_and_answered_in_kind(tmp_path: Path) -> None:
    guard = Guard(Credential(credential_file(tmp_path, OURS)))
    proof = Proof(OURS.encode(), NOW_MS)
    answer = guard.answer(proof.metadata[0][1], NOW_MS)
    proof.check(((ANSWER, answer),))
    with pytest.raises(Unauthenticated, match="used before"):
        guard.answer(proof.metadata[0][1], NOW_MS + 1)
    with pytest.raises(grpc.aio.AioRpcError):
        Proof(OURS.encode(), NOW_MS).check(((ANSWER, answer),))


def test_no_proof_and_no_answer_holds_the_credential(tmp_path: Path) -> None:
    guard = Guard(Credential(credential_file(tmp_path, OURS)))
    assert OURS not in sent() + guard.answer(sent(), NOW_MS)


@pytest.mark.parametrize(
    ("proof", "why"),
    [
        ("", "no proof of it came"),
        (sent(THEIRS), "another than ours"),
        (sent()[:-1] + "x", "another than ours"),
        (sent().replace(str(NOW_MS), str(NOW_MS + 1)), "another than ours"),
        ("é.é", "another than ours"),
        ("1.2.3.4.5", "another than ours"),
        (sent(at_ms=NOW_MS - 1000 * (SKEW_S_MAX + 1)), f"clock is {SKEW_S_MAX + 1} s behind ours"),
        (
            sent(at_ms=NOW_MS + 1000 * (SKEW_S_MAX + 1)),
            f"clock is {SKEW_S_MAX + 1} s ahead of ours",
        ),
    ],
)
def test_what_proves_nothing_is_refused(tmp_path: Path, proof: str, why: str) -> None:
    guard = Guard(Credential(credential_file(tmp_path, OURS)))
    with pytest.raises(Unauthenticated, match=why):
        guard.answer(proof, NOW_MS)


def test_a_proof_is_remembered_for_as_long_as_it_would_be_taken(tmp_path: Path) -> None:
    """From a clock that is ahead of ours by all it may be, until ours is ahead as much."""
    guard = Guard(Credential(credential_file(tmp_path, OURS)))
    proof = sent(at_ms=NOW_MS + 1000 * SKEW_S_MAX)
    guard.answer(proof, NOW_MS)
    late_ms = NOW_MS + 2000 * SKEW_S_MAX
    guard.answer(sent(at_ms=late_ms), late_ms)
    with pytest.raises(Unauthenticated, match="used before"):
        guard.answer(proof, late_ms)
    guard.answer(sent(at_ms=late_ms + 1), late_ms + 1)
    with pytest.raises(Unauthenticated, match="s behind ours"):
        guard.answer(proof, late_ms + 1)


def test_a_credential_is_changed_without_a_moment_of_refusals(tmp_path: Path) -> None:
    path = credential_file(tmp_path, OURS)
    credential = Credential(path)
    guard = Guard(credential)

    def replace(text: str) -> None:
        draft = tmp_path / "draft"
        draft.write_text(text)
        draft.chmod(0o600)
        os.replace(draft, path)

    replace(f"{OURS}\n{THEIRS}\n")
    guard.answer(sent(OURS), NOW_MS)
    guard.answer(sent(THEIRS), NOW_MS)
    assert credential.now()[0] == OURS.encode()
    replace(f"{THEIRS}\n")
    with pytest.raises(Unauthenticated):
        guard.answer(sent(OURS), NOW_MS)
    with capture_logs() as logs:
        replace("short")
        guard.answer(sent(THEIRS), NOW_MS)
        path.unlink()
        guard.answer(sent(THEIRS), NOW_MS)
        guard.answer(sent(THEIRS), NOW_MS)
    first, second = (each["reason"] for each in logs)
    assert "must have 32 to 512 characters" in first
    assert "No such file" in second


def test_a_new_credential_that_others_could_read_is_taken_once_they_cannot(tmp_path: Path) -> None:
    path = credential_file(tmp_path, OURS)
    guard = Guard(Credential(path))
    path.unlink()
    path.write_text(THEIRS)
    path.chmod(0o644)
    with capture_logs() as logs, pytest.raises(Unauthenticated):
        guard.answer(sent(THEIRS), NOW_MS)
    assert "is open to every user: chmod o-rwx" in logs[0]["reason"]
    path.chmod(0o640)
    guard.answer(sent(THEIRS), NOW_MS)


@pytest.mark.parametrize(
    ("lines", "mode", "why"),
    [
        ((OURS,), 0o604, "chmod o-rwx"),
        (("short",), 0o600, "32 to 512 characters a line, got 5"),
        (("",), 0o600, "1 to 8 lines, got 0"),
        ((OURS,) * 9, 0o600, "1 to 8 lines, got 9"),
        (("ä" * 40,), 0o600, "not ASCII"),
    ],
)
def test_a_file_that_is_no_credential_is_refused(
    tmp_path: Path, lines: tuple[str, ...], mode: int, why: str
) -> None:
    path = credential_file(tmp_path, *lines, mode=mode)
    with pytest.raises(ConfigError, match=why) as caught:
        Credential(path)
    assert "short" not in str(caught.value)
    with pytest.raises(ConfigError, match="No such file"):
        Credential(tmp_path / "nowhere")


def test_of_several_that_make_a_credential_at_once_one_has(tmp_path: Path) -> None:
    path = tmp_path / "made"
    make_credential(path)
    made = path.read_text()
    make_credential(path)
    assert path.read_text() == made
    assert path.stat().st_mode & 0o777 == 0o600
    assert [*tmp_path.iterdir()] == [path]
    Credential(path)
    with pytest.raises(ConfigError, match="cannot be made: No such file"):
        make_credential(tmp_path / "nowhere" / "made")


# A port


@asynccontextmanager
async def served(
    peers: Peers, settings: PartSettings | None = None, *, is_hasty: bool = False
) -> AsyncIterator[Bound]:
    """A part with a method of each kind, which says what it was asked. Hasty: it answers a stream
    of requests before it has read them.
    """
    reached: list[str] = []

    async def unary(request: Any, _context: Any) -> bytes:
        reached.append("unary")
        await read(request)
        return b"ok"

    async def stream(request: Any, _context: Any) -> AsyncIterator[bytes]:
        reached.append("stream")
        await read(request)
        yield b"ok"

    async def read(request: Any) -> None:
        """A client that writes what its server does not wait for hears INTERNAL of itself."""
        if hasattr(request, "__aiter__") and not is_hasty:
            async for _ in request:
                pass

    server = grpc_server.create_server(interceptors=peers.interceptors())
    handlers = {
        kind: getattr(grpc, f"{kind}_rpc_method_handler")(
            stream if kind.endswith("stream") else unary
        )
        for kind in KINDS
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", handlers),))
    grpc_server.add_health(server).set("", "")
    bound = await peers.bind(server, settings or PartSettings())
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(0)


async def call(
    channel: grpc.aio.Channel, kind: str, proof: Proof, *, is_silent: bool = False
) -> list[bytes]:
    """Silent: of a stream of requests nothing is written. A client that writes while it is refused
    hears INTERNAL of itself instead."""

    async def requests() -> AsyncIterator[bytes]:
        if is_silent:
            await asyncio.Event().wait()
        yield b"x"

    method = getattr(channel, kind)(f"/t.T/{kind}")
    request = requests() if kind.startswith("stream") else b"x"
    rpc = method(request, timeout=WAIT_S, metadata=proof.metadata)
    if kind.endswith("stream"):
        return [answer async for answer in proof.stream(rpc)]
    answer = await rpc
    proof.check(await rpc.initial_metadata())
    return [answer]


async def refusal(peers: Peers, address: str, kind: str = "unary_unary") -> grpc.aio.AioRpcError:
    async with peers.channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, kind, peers.proof(), is_silent=True)
    return caught.value


@pytest.mark.parametrize("kind", KINDS)
async def test_only_who_has_the_credential_is_let_in(tmp_path: Path, kind: str) -> None:
    ours = sharing(tmp_path, OURS)
    async with served(ours) as bound:
        async with ours.channel(str(bound)) as channel:
            assert await call(channel, kind, ours.proof()) == [b"ok"]
        with capture_logs() as logs:
            for stranger in (Peers(), sharing(tmp_path, THEIRS)):
                error = await refusal(stranger, str(bound), kind)
                assert error.code() is UNAUTHENTICATED
                assert "--peer-credential-file" in str(error.details())
    (told,) = [each for each in logs if each["event"] == "peer.refused"]
    assert told["method"] == f"/t.T/{kind}"


async def test_a_call_that_was_overheard_cannot_be_made_again(tmp_path: Path) -> None:
    ours = sharing(tmp_path, OURS)
    async with served(ours) as bound, ours.channel(str(bound)) as channel:
        proof = ours.proof()
        await call(channel, "unary_unary", proof)
        with pytest.raises(grpc.aio.AioRpcError, match="used before"):
            await call(channel, "unary_unary", proof)


async def test_parts_are_reached_past_a_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the environment says of one, as that of a container often does unasked."""
    with HeldPort() as nobody:
        monkeypatch.setenv("http_proxy", f"http://{nobody.address}")
        ours = sharing(tmp_path, OURS)
        async with served(ours) as bound, ours.channel(str(bound)) as channel:
            assert await call(channel, "unary_unary", ours.proof()) == [b"ok"]
            with ours.blocking_channel(str(bound)) as blocking:
                await asyncio.to_thread(grpc.channel_ready_future(blocking).result, WAIT_S)
            assert await state_of(str(bound)) == "serving"


@pytest.mark.parametrize("kind", KINDS)
async def test_who_took_the_address_of_a_part_is_not_taken_for_it(
    tmp_path: Path, kind: str
) -> None:
    """It lets everybody in, and knows nothing of our credential; nor does it learn it."""
    ours = sharing(tmp_path, OURS)
    async with served(Peers(), is_hasty=True) as bound:
        error = await refusal(ours, str(bound), kind)
    assert error.code() is UNAUTHENTICATED
    assert "whoever answered" in str(error.details())


async def test_health_checks_need_no_credential(tmp_path: Path) -> None:
    async with (
        served(sharing(tmp_path, OURS)) as bound,
        grpc.aio.insecure_channel(str(bound)) as channel,
    ):
        answer = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=WAIT_S
        )
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "part.example"])
async def test_nobody_listens_for_everybody_by_mistake(host: str) -> None:
    server = grpc_server.create_server()
    with pytest.raises(ConfigError, match="--allow-anyone"):
        await Peers().bind(server, PartSettings(grpc_host=host))


async def test_who_wants_everybody_is_warned(tmp_path: Path) -> None:
    with capture_logs() as logs:
        async with served(Peers(), PartSettings(grpc_host="0.0.0.0", allow_anyone=True)):
            pass
        async with served(sharing(tmp_path, OURS), PartSettings(grpc_host="0.0.0.0")):
            pass
    assert [each["event"] for each in logs] == ["peers.anyone"]


# Certificates


async def test_certificates_are_asked_of_both_sides(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path / "ours"), Authority(tmp_path / "other")
    part = authority.issue_to_part("part")
    good = Peers(certificates=authority.issue_to_part("another part"))
    async with served(Peers(certificates=part)) as bound:
        async with good.channel(str(bound)) as channel:
            assert await call(channel, "unary_unary", good.proof()) == [b"ok"]
        strangers = [
            Peers(),
            Peers(certificates=other.issue_to_part("part")),
            Peers(certificates=authority.issue_to_part("old", **EXPIRED)),
        ]
        # It trusts ours, and has one of another authority itself.
        mixed = dataclasses.replace(other.issue_to_part("mixed"), ca=part.ca)
        strangers.append(Peers(certificates=mixed))
        for stranger in strangers:
            assert (await refusal(stranger, str(bound))).code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(("name", "validity"), [("other.example", RECENT), ("127.0.0.1", EXPIRED)])
async def test_a_part_with_anothers_name_or_an_old_certificate_is_told_nothing(
    tmp_path: Path, name: str, validity: dict[str, Any]
) -> None:
    authority = Authority(tmp_path)
    part = authority.issue_to_part("part", name, **validity)
    async with served(Peers(certificates=part)) as bound:
        error = await refusal(Peers(certificates=authority.issue_to_part("caller")), str(bound))
    assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_probe_shows_a_certificate_where_one_is_asked_for(tmp_path: Path) -> None:
    """As `kaiten healthcheck --tls-ca --tls-cert --tls-key` does."""
    part = Authority(tmp_path).issue_to_part("part")
    async with served(Peers(certificates=part)) as bound:
        own = TLS(ca=part.ca, cert=part.cert, key=part.key)
        assert await state_of(str(bound), tls=own) == "serving"
        assert await state_of(str(bound), tls=TLS(ca=part.ca)) != "serving"


async def test_certificates_are_renewed_without_a_restart(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    part, caller = (
        authority.issue_to_part("part"),
        Peers(certificates=authority.issue_to_part("caller")),
    )
    async with served(Peers(certificates=part)) as bound:
        authority.issue_to_part("part", "other.example")
        assert (await refusal(caller, str(bound))).code() is grpc.StatusCode.UNAVAILABLE
        part.cert.write_text("not yet whole")
        authority.issue_to_part("part")
        async with caller.channel(str(bound)) as channel:
            assert await call(channel, "unary_unary", caller.proof()) == [b"ok"]
        # What is of no use is not taken.
        authority.issue_to_part("part", **EXPIRED)
        async with caller.channel(str(bound)) as channel:
            assert await call(channel, "unary_unary", caller.proof()) == [b"ok"]
        # While those of the caller are written, it goes on with the former.
        (tmp_path / "caller" / "cert.pem").write_text("not yet whole")
        (tmp_path / "caller" / "key.pem").unlink()
        async with caller.channel(str(bound)) as channel:
            assert await call(channel, "unary_unary", caller.proof()) == [b"ok"]


def shown_by(part: Certificates) -> dict[str, Path]:
    return {"peer_tls_cert": part.cert, "peer_tls_key": part.key}


def test_certificates_that_cannot_be_used_end_the_start(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "a")
    part = authority.issue_to_part("part")
    old = authority.issue_to_part("old", **EXPIRED)
    early = authority.issue_to_part("early", **EARLY)
    other = Authority(tmp_path / "b").issue_to_part("other")
    past, future = Authority(tmp_path / "c", **EXPIRED), Authority(tmp_path / "d", **EARLY)
    files: dict[str, Any] = {
        "peer_tls_cert": part.cert,
        "peer_tls_key": part.key,
        "peer_tls_ca": part.ca,
    }
    Peers.of(PartSettings(**files))
    for wrong, why in (
        ({"peer_tls_ca": None}, "go together"),
        ({"peer_tls_key": other.key}, "--peer-tls-cert .* cannot be used"),
        ({"peer_tls_cert": tmp_path / "none"}, "--peer-tls-cert .* cannot be used"),
        ({"peer_tls_key": encrypted(part.key, tmp_path)}, "--peer-tls-key .* is encrypted, and"),
        ({"peer_tls_ca": part.key}, "--peer-tls-ca .* cannot be used"),
        (shown_by(old), r"--peer-tls-cert .*old/cert.pem: the certificate has expired, on \d{4}-"),
        (shown_by(early), "--peer-tls-cert .*early/cert.pem: the certificate is not valid before"),
        ({"peer_tls_ca": past.pem}, r"--peer-tls-ca .*: the certificate has expired, on \d{4}-"),
        ({"peer_tls_ca": future.pem}, "--peer-tls-ca .*: the certificate is not valid before"),
    ):
        with pytest.raises(ConfigError, match=why):
            Peers.of(PartSettings(**(files | wrong)))


def test_one_authority_of_a_file_has_to_be_valid(tmp_path: Path) -> None:
    """As while they are being replaced."""
    part = Authority(tmp_path / "a").issue_to_part("part")
    past = Authority(tmp_path / "b", **EXPIRED)
    part.ca.write_bytes(past.pem.read_bytes() + part.ca.read_bytes())
    part.check()


def test_a_certificate_of_parts_that_ends_soon_is_a_warning(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    late = authority.issue_to_part("late")
    soon = authority.issue_to_part("soon", not_after=EARLY["not_before"])
    with capture_logs() as logs:
        for part in (late, soon, soon):
            part.check()
    assert [(each["event"], each["cert"]) for each in logs] == [("tls.ends_soon", str(soon.cert))]


# Sockets


def private(folder: Path) -> PartSettings:
    folder.mkdir(mode=0o700, exist_ok=True)
    return PartSettings(grpc_socket=folder / "a b%#.sock")


async def test_a_part_on_a_socket_is_reached_by_what_it_advertises(tmp_path: Path) -> None:
    async with served(Peers(), private(tmp_path / "run")) as bound:
        address = await bound.advertised("127.0.0.1:1")
        assert address == str(bound)
        assert address.startswith("unix:/")
        async with Peers().channel(address) as channel:
            assert await call(channel, "unary_unary", Proof(None)) == [b"ok"]


async def test_what_a_killed_process_left_is_taken_over_and_a_living_one_is_not(
    tmp_path: Path,
) -> None:
    settings = private(tmp_path / "run")
    assert settings.grpc_socket is not None
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(settings.grpc_socket))
    assert settings.grpc_socket.is_socket()
    async with served(Peers(), settings) as bound:
        with pytest.raises(ConfigError, match="listened on by another process"):
            await Peers().bind(grpc_server.create_server(), settings)
        async with Peers().channel(str(bound)) as channel:
            assert await call(channel, "unary_unary", Proof(None)) == [b"ok"]


async def test_a_socket_that_others_could_reach_is_refused(tmp_path: Path) -> None:
    settings = private(tmp_path / "run")
    (tmp_path / "run").chmod(0o711)
    with pytest.raises(ConfigError, match="chmod 700"):
        await Peers().bind(grpc_server.create_server(), settings)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("x" * 120, "at most 107 bytes"),
        ("a,b", "comma"),
        ("none/a.sock", "No such file"),
        ("file", "no socket"),
    ],
)
async def test_a_socket_that_cannot_be_is_refused(tmp_path: Path, name: str, why: str) -> None:
    folder = private(tmp_path / "run").grpc_socket.parent  # type: ignore[union-attr]
    (folder / "file").touch()
    with pytest.raises(ConfigError, match=why):
        await Peers().bind(grpc_server.create_server(), PartSettings(grpc_socket=folder / name))
