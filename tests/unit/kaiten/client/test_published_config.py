"""What is published for callers: the service config, and keys that the gateway takes."""

import json
from pathlib import Path

import grpc
import pytest

from gateway import tenants
from kaiten.cli.keygen import mint
from kaiten.client import Client
from kaiten.client.connection import SERVICE_CONFIG, with_key
from kaiten.v1 import inference_service_pb2 as pb
from kaiten.v1 import model_service_pb2
from kaiten.v1.inference_service_pb2_grpc import InferenceServiceStub
from service_kit.errors import Overloaded, Unavailable
from tests.support.scripted_gateway import ScriptedGateway, accepted, delta, done, finished

PUBLISHED = Path(__file__).parents[4] / "deploy" / "service-config.json"
WHOLE = [accepted(), delta(0, "abc"), finished(3), done(3)]


def test_the_file_is_what_the_client_uses_and_names_real_services() -> None:
    config = json.loads(PUBLISHED.read_text())
    assert config == SERVICE_CONFIG
    services = {
        service.full_name
        for file in (pb.DESCRIPTOR, model_service_pb2.DESCRIPTOR)
        for service in file.services_by_name.values()
    }
    named = {name["service"] for method in config["methodConfig"] for name in method["name"]}
    assert named == services


async def test_a_plain_stub_with_the_file_repeats_what_no_gateway_took() -> None:
    away = Unavailable("draining", retry_after_s=0.01)
    options = [("grpc.service_config", PUBLISHED.read_text())]
    async with (
        ScriptedGateway([away], [away], WHOLE) as gateway,
        grpc.aio.insecure_channel(gateway.address, options=options) as channel,
    ):
        call = InferenceServiceStub(channel).Generate(pb.GenerateRequest(text="x"), timeout=60)
        events = [response.event async for response in call]
        assert events[-1].HasField("done")
        assert len(gateway.calls) == 3


async def test_an_overload_is_not_repeated_behind_the_callers_back() -> None:
    options = [("grpc.service_config", PUBLISHED.read_text())]
    async with (
        ScriptedGateway([Overloaded("full", 0.01)], WHOLE) as gateway,
        grpc.aio.insecure_channel(gateway.address, options=options) as channel,
    ):
        call = InferenceServiceStub(channel).Generate(pb.GenerateRequest(text="x"), timeout=60)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [response async for response in call]
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert len(gateway.calls) == 1


def test_a_minted_key_opens_the_gateway(tmp_path: Path) -> None:
    first, second = mint("acme"), mint("other.org")
    assert first.key != mint("acme").key
    path = tmp_path / "keys.toml"
    path.write_text(first.entry + second.entry)
    ring = tenants.KeysFile(path).keyring
    [(_, header)] = with_key((), first.key)
    assert ring.tenant_of(header).name == "acme"
    assert ring.tenant_of(f"Bearer {second.key}").name == "other.org"
    assert first.key not in path.read_text()
    assert with_key((("a", "b"),), None) == (("a", "b"),)


@pytest.mark.parametrize("key", ["kt-a\n", "kt-ä"])
def test_a_key_that_no_header_holds_is_told_and_not_shown(key: str) -> None:
    with pytest.raises(ValueError, match=r"api_key: must be printable ASCII; .* line end") as told:
        Client("127.0.0.1:1", api_key=key)
    assert key.strip() not in str(told.value)


@pytest.mark.parametrize("name", ["", "a b", "../x", 'x"]', "x" * 65])
def test_a_wrong_tenant_name_gets_no_key(name: str) -> None:
    with pytest.raises(ValueError, match="must match"):
        mint(name)
