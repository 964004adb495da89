"""Send hostile requests at a gateway's two doors and see that nothing of it is felt.

`python -m tests.fuzz.run --requests 50000 --seconds-max 720 --save` starts a stack of its own,
prints one JSON line and appends it to benchmarks/results/fuzz.jsonl. Tests use `Fuzz` itself.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import grpc
import httpx
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from benchmarks.recording import record
from kaiten.v1 import inference_service_pb2, model_service_pb2
from tests.fuzz import documents
from tests.fuzz.documents import Sent
from tests.fuzz.messages import wire
from tests.support.whole_stack import WholeStack

SERVICES: Final[tuple[ServiceDescriptor, ...]] = (
    inference_service_pb2.DESCRIPTOR.services_by_name["InferenceService"],
    model_service_pb2.DESCRIPTOR.services_by_name["ModelService"],
)
# Those that take the most are called the most.
METHODS: Final = [
    method
    for service in SERVICES
    for method in service.methods
    for _ in range(4 if method.name.startswith("Generate") else 1)
]
# A request that is right may run to the end of the context; nobody waits for it.
CALL_S_MAX: Final = 1.0
WATCHED: Final = "/v1/watch"
BATCH: Final = 12
METADATA: Final = (
    (),
    (),
    (("traceparent", "00-zz"),),
    (("authorization", "Bearer " + "k" * 600),),
    (("x-bin", b"\xff\x00" * 50),),
    (("x-many", "v" * 3000),),
)


class Rpc(NamedTuple):
    """One call as bytes. `reads`: messages taken before the client leaves."""

    method: MethodDescriptor
    raw: bytes
    metadata: tuple[tuple[str, str | bytes], ...]
    reads: int


@st.composite
def rpcs(draw: st.DrawFn) -> Rpc:
    """Calls of any public method."""
    method = draw(st.sampled_from(METHODS))
    raw = draw(wire(method.input_type))
    return Rpc(method, raw, draw(st.sampled_from(METADATA)), draw(st.sampled_from((1, 2, 1000))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A reply that must not be."""

    what: str
    sent: str


class Fuzz:
    """Counts what came back; `findings` are the replies no client may ever see."""

    def __init__(self, grpc_address: str, http_url: str) -> None:
        self.outcomes: Counter[str] = Counter()
        self.findings: list[Finding] = []
        self.sent = 0
        self._channel = grpc.insecure_channel(grpc_address)
        self._http = httpx.Client(base_url=http_url, timeout=30.0)
        self._document = self._http.get("/openapi.json").json()
        self._threads = ThreadPoolExecutor(BATCH)

    def close(self) -> None:
        self._threads.shutdown()
        self._http.close()
        self._channel.close()

    def run(self, requests: int, *, number: int, is_over: Callable[[], bool]) -> None:
        """So many requests from this seed, or fewer when it is over before."""
        posts = documents.requests(self._document)
        one = st.booleans().flatmap(lambda is_rpc: rpcs() if is_rpc else posts)

        @seed(number)
        @settings(
            max_examples=max(1, requests // BATCH),
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(st.lists(one, min_size=BATCH, max_size=BATCH))
        def send_all(batch: list[Rpc | Sent]) -> None:
            if not is_over():
                list(self._threads.map(self._send, batch))

        send_all()

    def _send(self, request: Rpc | Sent) -> None:
        outcome = self._call(request) if isinstance(request, Rpc) else self._post(request)
        self.sent += 1
        self.outcomes[outcome] += 1

    def _call(self, call: Rpc) -> str:
        service = call.method.containing_service
        path = f"/{service.full_name}/{call.method.name}"
        kind = "unary_stream" if call.method.server_streaming else "unary_unary"
        send = getattr(self._channel, kind)(path)
        try:
            reply = send(call.raw, timeout=CALL_S_MAX, metadata=call.metadata)
            if call.method.server_streaming:
                self._read(reply, call.reads)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            if code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
                what = f"{path} {code.name}: {error.details()}"
                self.findings.append(Finding(what=what, sent=call.raw[:400].hex()))
            return f"grpc {code.name}"
        return "grpc OK"

    def _read(self, reply: Any, count: int) -> None:
        for index, _ in enumerate(reply, start=1):
            if index >= count:
                reply.cancel()
                return

    def _post(self, sent: Sent) -> str:
        try:
            reply = self._exchange(self._http, sent)
        except httpx.TimeoutException:
            return "http left"
        except httpx.TransportError as error:
            # A kept connection may end just when it is used again; a fresh one may not.
            with httpx.Client(base_url=self._http.base_url) as fresh:
                try:
                    self._exchange(fresh, sent)
                except httpx.TimeoutException:
                    return "http left"
                except httpx.TransportError:
                    self._note(sent, type(error).__name__)
            return "http broken"
        self._check(sent, reply)
        return f"http {reply.status_code}"

    def _exchange(self, client: httpx.Client, sent: Sent) -> httpx.Response:
        headers = {"content-type": "application/json", **sent.headers}
        begin = time.monotonic()
        with client.stream(
            sent.method, sent.path, content=sent.body, headers=headers, timeout=CALL_S_MAX
        ) as reply:
            told = bytearray()
            for chunk in reply.iter_raw():
                told += chunk
                # What operators watch has no end of its own.
                if sent.template == WATCHED or time.monotonic() - begin > CALL_S_MAX:
                    break
        return httpx.Response(
            reply.status_code, headers=reply.headers, content=bytes(told), request=reply.request
        )

    def _check(self, sent: Sent, reply: httpx.Response) -> None:
        """No fault of ours, nothing undocumented, and every error in the form of errors."""
        if reply.status_code in (500, 502):
            self._note(sent, f"{reply.status_code} {reply.text[:200]}")
        operation = self._document["paths"][sent.template].get(sent.method.lower())
        known = set() if operation is None else set(operation["responses"])
        if known and str(reply.status_code) not in known:
            self._note(sent, f"undocumented {reply.status_code} {reply.text[:200]}")
        if reply.status_code >= 400 and reply.headers["content-type"] == "application/json":
            error = reply.json().get("error")
            if not isinstance(error, dict) or not error.get("message"):
                self._note(sent, f"no error object: {reply.text[:200]}")

    def _note(self, sent: Sent, what: str) -> None:
        body = (sent.body or b"")[:400].decode(errors="replace")
        self.findings.append(
            Finding(what=f"{sent.method} {sent.path}: {what}", sent=f"{dict(sent.headers)} {body}")
        )


def fuzz_stack(
    stack: WholeStack,
    requests: int,
    *,
    number: int,
    seconds_max: float,
    wanted: Set[str] = frozenset(),
) -> tuple[Fuzz, float]:
    """Fuzz a stack's first gateway. The caller checks the stack.

    Beyond its time, on a busy machine, only until every outcome of `wanted` was seen.
    """
    begin = time.monotonic()
    fuzz = Fuzz(stack.door.grpc, stack.door.http)

    def is_over() -> bool:
        return time.monotonic() - begin > seconds_max and wanted <= fuzz.outcomes.keys()

    try:
        round_ = 0
        while fuzz.sent < requests and not is_over():
            fuzz.run(
                min(4000, requests - fuzz.sent),
                number=number + round_,
                is_over=is_over,
            )
            round_ += 1
    finally:
        fuzz.close()
    return fuzz, time.monotonic() - begin


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--seconds-max", type=float, default=720.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, WholeStack(Path(folder)) as stack:
        fuzz, wall_s = fuzz_stack(
            stack, arguments.requests, number=arguments.seed, seconds_max=arguments.seconds_max
        )
        for finding in fuzz.findings[:20]:
            sys.stderr.write(f"{finding}\n")
        problem = ""
        try:
            stack.check()
        except AssertionError as error:
            problem = str(error)[:2000]
    figures: dict[str, object] = {
        "seed": arguments.seed,
        "requests": fuzz.sent,
        "wall_s": round(wall_s, 1),
        "findings": len(fuzz.findings),
        "invariants": problem or "hold",
        "outcomes": dict(sorted(fuzz.outcomes.items())),
    }
    record("fuzz", figures, save=arguments.save)
    sys.exit(bool(fuzz.findings or problem))


if __name__ == "__main__":
    main()
