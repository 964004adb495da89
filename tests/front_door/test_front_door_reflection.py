"""A client that has no stubs: every descriptor comes over the reflection API, as grpcurl's do."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from tests.support.whole_stack import WholeStack, wait_until

INFERENCE = "kaiten.v1.InferenceService"
MODELS = "kaiten.v1.ModelService"
HEALTH = "grpc.health.v1.Health"
Json = dict[str, Any]
SERVING: Json = {"status": "SERVING"}


class Curl:
    """JSON in, JSON out, for any method the server says it has."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self.database = ProtoReflectionDescriptorDatabase(self._channel)
        self._pool: Any = DescriptorPool(self.database)
        self.called: set[str] = set()

    def close(self) -> None:
        self._channel.close()

    def methods(self, service: str) -> list[MethodDescriptor]:
        return list(self._pool.FindServiceByName(service).methods)

    def call(self, service: str, name: str, body: Json, **options: Any) -> list[Json]:
        """All answers."""
        method = self._pool.FindServiceByName(service).FindMethodByName(name)
        request = ParseDict(body, GetMessageClass(method.input_type)())
        kind = "unary_stream" if method.server_streaming else "unary_unary"
        send = getattr(self._channel, kind)(
            f"/{service}/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        self.called.add(f"{service}/{name}")
        reply = send(request, timeout=60, **options)
        answers = reply if method.server_streaming else [reply]
        return [MessageToDict(answer) for answer in answers]


@pytest.fixture
def curl(whole_stack: WholeStack) -> Iterator[Curl]:
    curl = Curl(whole_stack.door.grpc)
    yield curl
    curl.close()


def text_of(answers: list[Json]) -> str:
    events = [answer["event"] for answer in answers if "event" in answer]
    return "".join(event.get("delta", {}).get("text", "") for event in events)


def ask(**more: Any) -> Json:
    return {"text": "The chef", "sampling": {"maxTokens": 24, "temperature": 0}, **more}


def test_the_services_are_listed(curl: Curl) -> None:
    listed = set(curl.database.get_services())
    assert {INFERENCE, MODELS, HEALTH} <= listed
    assert not any("Scheduler" in name or "Worker" in name for name in listed)


def test_every_method_is_called(curl: Curl, whole_stack: WholeStack) -> None:
    golden = whole_stack.golden["text"]
    [models] = curl.call(MODELS, "ListModels", {})
    assert models["models"][0]["name"] == "mini"
    [ids] = curl.call(MODELS, "Tokenize", {"text": "The chef"})
    [back] = curl.call(MODELS, "Detokenize", {"tokenIds": ids["tokenIds"]})
    assert back["text"] == "The chef"

    generated = curl.call(INFERENCE, "Generate", ask(requestId="curl-1"))
    assert [*generated[0]["event"]] == ["accepted"]
    assert [*generated[-1]["event"]] == ["done"]
    assert text_of(generated) == golden
    again = curl.call(INFERENCE, "Attach", {"requestId": "curl-1"})
    assert text_of(again) == golden
    batch = curl.call(INFERENCE, "GenerateBatch", {"requests": [ask(), ask(n=0), ask()]})
    for index in (0, 2):
        assert text_of([each for each in batch if each.get("index", 0) == index]) == golden
    [refused] = [each for each in batch if each.get("index") == 1]
    assert refused["error"]["code"] == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    [looked] = curl.call(INFERENCE, "GetRequest", {"requestId": "curl-1"})
    assert looked["state"] == "REQUEST_STATE_FINISHED"
    assert curl.call(INFERENCE, "Cancel", {"requestId": "curl-1"}) == [{}]
    [explained] = curl.call(INFERENCE, "Explain", {"requestId": "curl-1"})
    phases = [interval["phase"] for interval in explained["choices"][0]["intervals"]]
    assert "TIMELINE_PHASE_DECODE" in phases

    every = {f"{s}/{method.name}" for s in (INFERENCE, MODELS) for method in curl.methods(s)}
    assert curl.called == every


def test_health_by_reflection(curl: Curl) -> None:
    for service in ("", INFERENCE, MODELS):

        def is_serving(name: str = service) -> bool:
            return curl.call(HEALTH, "Check", {"service": name}) == [SERVING]

        # A look at the store that took long is a moment of not serving.
        wait_until(is_serving, f"{service or 'everything'} is served")
    with pytest.raises(grpc.RpcError) as caught:
        curl.call(HEALTH, "Check", {"service": "nobody"})
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    "path",
    [
        "/kaiten.v1.InferenceService/generate",
        "/kaiten.v1.inferenceservice/Generate",
        "/kaiten.v1.InferenceService/Generate/",
        "/kaiten.v1.SchedulerService/GetState",
        "/kaiten.v1.WorkerService/Describe",
        "/grpc.channelz.v1.Channelz/GetServers",
        "/x",
    ],
)
def test_what_is_no_method_of_ours_is_unimplemented(whole_stack: WholeStack, path: str) -> None:
    with grpc.insecure_channel(whole_stack.door.grpc) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(path)(b"", timeout=30)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
