"""The HTTP endpoints that answer at once: models, tokens, health."""

import asyncio
import hashlib
from base64 import b64encode
from collections.abc import AsyncIterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from gateway.http.bodies import Bodies
from gateway.http.exchange import now_s
from gateway.http.sse import encode
from gateway.openai import openapi, request_models
from gateway.openai.reply_models import Health, Model, Models, NotServing, Serving, Text, Version
from gateway.openai.request_models import BodyT, DetokenizeBody, TokenizeBody, with_aliases
from gateway.openai.unknown_fields import UnknownFields
from gateway.requests.service import Front
from gateway.requests.validation import Limits
from gateway.settings import GatewaySettings
from service_kit.errors import NotFound
from service_kit.metrics import Metrics

# Numbers written between two looks at the other requests: a few milliseconds.
PIECE: Final = 1 << 14
DOCS: Final = Path(__file__).with_name("docs.html").read_bytes()
# It loads the document and nothing else, and runs no script but its own.
DOCS_POLICY: Final = (
    "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; frame-ancestors 'none'; "
    "base-uri 'none'; form-action 'none'; script-src 'sha256-{digest}'"
)
NOT_YET: Final = {"retry-after": "1", "x-should-retry": "true"}


class Pages:
    """The small endpoints: models, tokens, health, version."""

    def __init__(
        self,
        front: Front,
        config: GatewaySettings,
        bodies: Bodies,
        metrics: Metrics,
        unknown: UnknownFields,
    ) -> None:
        self._unknown = unknown
        self._front = front
        self._metrics = metrics
        self._bodies = bodies
        self._prompts_max = config.prompts_max
        self._started_s = now_s()
        self._document: tuple[Limits, bytes] | None = None

    async def models(self, _request: Request) -> Response:
        """The model while it is served: scripts wait for this one rather than for /ready."""
        self._front.readiness.check()
        return _json(Models([self._model()]))

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._front.card.name:
            raise NotFound(f"model {name[:128]!r}")
        self._front.readiness.check()
        return _json(self._model())

    async def tokenize(self, request: Request) -> Response:
        body, headers = await self._parsed(TokenizeBody, request)
        token_ids = await self._front.tokenize(body.ask(), request.state.tenant)
        context = self._front.limits.context_tokens_max
        ids = b",".join([piece async for piece in _written(token_ids)])
        head = f'{{"count":{len(token_ids)},"max_model_len":{context},"tokens":['.encode()
        return Response(head + ids + b"]}", media_type="application/json", headers=headers)

    async def detokenize(self, request: Request) -> Response:
        body, headers = await self._parsed(DetokenizeBody, request)
        with with_aliases(body):
            text = await self._front.detokenize(body.ask())
        return _json(Text(text), headers=headers)

    async def openapi(self, _request: Request) -> Response:
        """Made when it is asked for, and again only when a worker has changed the limits."""
        limits = self._front.limits
        if self._document is None or self._document[0] != limits:
            name = self._front.card.name
            content = openapi.document(
                version("kaiten"),
                name,
                limits,
                self._prompts_max,
                refuses_unknown=self._unknown.are_refused,
            )
            self._document = limits, encode(content)
        return Response(self._document[1], media_type="application/json")

    async def docs(self, _request: Request) -> Response:
        """The same document for people."""
        script = DOCS.partition(b"<script>")[2].partition(b"</script>")[0]
        digest = b64encode(hashlib.sha256(script).digest()).decode()
        policy = {"content-security-policy": DOCS_POLICY.format(digest=digest)}
        return Response(DOCS, media_type="text/html", headers=policy)

    async def health(self, _request: Request) -> Response:
        """Alive: this loop turns. Whether requests can be served, /ready tells."""
        return _json(Health())

    async def ready(self, _request: Request) -> Response:
        problem = self._front.readiness.problem
        if problem:
            return _json(NotServing(problem), 503, NOT_YET)
        return _json(Serving())

    async def metrics(self, request: Request) -> Response:
        """For Prometheus; takes a millisecond, which is why it needs no thread."""
        page = self._metrics.page(request.headers.get("accept", ""))
        return Response(page.body, headers={"content-type": page.content_type})

    async def version(self, _request: Request) -> Response:
        return _json(Version(version("kaiten")))

    async def _parsed(self, kind: type[BodyT], request: Request) -> tuple[BodyT, dict[str, str]]:
        """The body, and what the answer says of it."""
        sent = await self._bodies.read(request.scope, request.receive)
        ignored = self._unknown.of_a_body()
        body = request_models.parse(kind, sent, ignored)
        return body, self._unknown.told(ignored)

    def _model(self) -> Model:
        return Model(
            id=self._front.card.name,
            created=self._started_s,
            max_model_len=self._front.limits.context_tokens_max,
        )


def _json(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode(content), status, headers, "application/json")


async def _written(numbers: Sequence[int]) -> AsyncIterator[bytes]:
    """As JSON, with a chance for everybody else after every piece: there may be millions."""
    for start in range(0, len(numbers), PIECE):
        yield ",".join(map(str, numbers[start : start + PIECE])).encode()
        await asyncio.sleep(0)
