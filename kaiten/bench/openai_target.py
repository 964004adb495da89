"""Any OpenAI-compatible server, through /v1/completions as a stream of server-sent events.

Servers differ in what they take beyond the standard. `prepare` tries the dialects from the most
exact to the plainest with a one-token request and stays with the first that is answered; the report
names it. A frame's tokens are counted by its token ids where the server returns them, else as one;
if the server's own count at the end differs, that count is the output's.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

import httpx

from kaiten.bench.outcomes import AskError, Ending, OnTokens
from kaiten.bench.workload import Job
from kaiten.client.connection import with_key
from kaiten.tls import TLS, certificate_problem, verifier

CONNECT_S: Final = 10.0
PROBE: Final = Job(index=0, prompt=(7, 8, 9), output_tokens=1)
# With a plain text prompt, one short common word a token, more or less.
WORDS: Final = ("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """What of the common extensions a server understands."""

    name: str
    sends_token_ids: bool
    # Keys that force the length; servers that know none of them may stop early.
    extras: Mapping[str, Any]


FORCED: Final = {"ignore_eos": True}
DIALECTS: Final = (
    Dialect(
        name="token ids both ways, forced length",
        sends_token_ids=True,
        extras={**FORCED, "min_tokens": None, "return_token_ids": True},
    ),
    Dialect(name="token ids in, forced length", sends_token_ids=True, extras=FORCED),
    Dialect(name="token ids in", sends_token_ids=True, extras={}),
    Dialect(name="text in", sends_token_ids=False, extras={}),
)


class OpenAITarget:
    """One server over HTTP."""

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        is_plain: bool,
        api_key: str | None = None,
        tls: TLS | None = None,
    ) -> None:
        self._base_url = base_url
        self._model = model
        self._dialects = DIALECTS[-1:] if is_plain else DIALECTS
        self._dialect = DIALECTS[-1]
        self.vocab_size: int | None = None
        self.context_tokens: int | None = None
        self._http = httpx.AsyncClient(
            base_url=base_url,
            headers=dict(with_key((), api_key)),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            trust_env=False,
            verify=verifier(base_url, tls),
        )

    @property
    def says(self) -> str:
        return f"{self._model} at {self._base_url} ({self._dialect.name})"

    async def prepare(self) -> None:
        await self._choose_model()
        refusal: AskError | None = None
        for dialect in self._dialects:
            self._dialect = dialect
            try:
                await self.ask(PROBE, lambda _: None, 60.0)
            except AskError as error:
                # Another status than "your request is wrong" is no matter of dialect.
                if error.kind not in ("http 400", "http 422"):
                    raise
                refusal = error
            else:
                return
        assert refusal is not None
        raise refusal

    async def _choose_model(self) -> None:
        try:
            answer = await self._http.get("/v1/models", timeout=CONNECT_S)
            if answer.status_code == 503:
                raise AskError("unavailable", f"{self._base_url} is not ready: {answer.text[:200]}")
            models = models_of(answer.json()) if answer.status_code == 200 else {}
        except httpx.HTTPError as error:
            said = certificate_problem(str(error)) or str(error) or repr(error)
            raise AskError("unavailable", f"{self._base_url}: {said}") from error
        except ValueError:
            models = {}
        self._model = self._model or next(iter(models), "default")
        self.context_tokens = models.get(self._model)

    async def ask(self, job: Job, on_tokens: OnTokens, timeout_s: float) -> Ending:
        usage: Mapping[str, Any] = {}
        counted = 0
        try:
            async with asyncio.timeout(timeout_s):
                async for event in self._events(self._body(job)):
                    usage = event.get("usage") or usage
                    if (tokens := tokens_of(event)) > 0:
                        counted += tokens
                        on_tokens(tokens)
        except TimeoutError:
            raise AskError("timeout", f"no end within {timeout_s:g} s") from None
        except httpx.HTTPError as error:
            raise AskError("connection", repr(error)) from error
        details = usage.get("prompt_tokens_details") or {}
        return Ending(
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            output_tokens=int(usage.get("completion_tokens") or counted),
            cached_tokens=int(details.get("cached_tokens") or 0),
        )

    def _body(self, job: Job) -> dict[str, Any]:
        extras = dict(self._dialect.extras)
        if "min_tokens" in extras:
            extras["min_tokens"] = job.output_tokens
        return {
            "model": self._model,
            "prompt": list(job.prompt) if self._dialect.sends_token_ids else text_of(job),
            "max_tokens": job.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **extras,
        }

    async def _events(self, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        async with aclosing(await self._post(body)) as answer:
            if answer.status_code != 200:
                text = (await answer.aread()).decode("utf-8", "replace")
                raise AskError(f"http {answer.status_code}", text[:300])
            async for line in answer.aiter_lines():
                if not line.startswith("data:") or line.endswith("[DONE]"):
                    continue
                try:
                    event = json.loads(line[5:])
                except ValueError as error:
                    raise AskError("bad stream", line[:300]) from error
                if not is_sound(event):
                    raise AskError("bad stream", line[:300])
                if "error" in event:
                    raise AskError("error in stream", str(event["error"])[:300])
                yield event

    async def _post(self, body: Mapping[str, Any]) -> httpx.Response:
        """A server may close a kept connection just when it is used again; llama.cpp's does so now
        and then after a stream. That is no answer to this request: it goes out on another one."""
        while True:
            is_new = False

            async def trace(event: str, _: object) -> None:
                nonlocal is_new
                is_new = is_new or event.startswith("connection.connect")

            request = self._http.build_request(
                "POST", "/v1/completions", json=body, extensions={"trace": trace}
            )
            try:
                return await self._http.send(request, stream=True)
            except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
                if is_new:
                    raise

    async def close(self) -> None:
        await self._http.aclose()


def models_of(body: Any) -> dict[str, int | None]:
    """Names of what is served and its context, as far as the server says."""
    listed = body.get("data") if isinstance(body, dict) else None
    found = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    return {
        str(each["id"]): limit if isinstance(limit := each.get("max_model_len"), int) else None
        for each in found
        if "id" in each
    }


def is_sound(event: Any) -> bool:
    """Whether it has the shape of a completion's event, as far as that is read here."""
    if not isinstance(event, dict):
        return False
    usage, choices = event.get("usage") or {}, event.get("choices") or []
    if not isinstance(usage, dict) or not isinstance(choices, list):
        return False
    details = usage.get("prompt_tokens_details") or {}
    if not isinstance(details, dict):
        return False
    counts = (
        usage.get("prompt_tokens"),
        usage.get("completion_tokens"),
        details.get("cached_tokens"),
    )
    return all(isinstance(count, int | float | None) for count in counts) and all(
        isinstance(each, dict) and isinstance(each.get("token_ids"), list | None)
        for each in choices
    )


def tokens_of(event: Mapping[str, Any]) -> int:
    """New tokens that an event brings."""
    choices = event.get("choices") or [{}]
    if (token_ids := choices[0].get("token_ids")) is not None:
        return len(token_ids)
    return 1 if choices[0].get("text") else 0


def text_of(job: Job) -> str:
    """About as many tokens of common words, different for different prompts."""
    return " ".join(WORDS[token % len(WORDS)] for token in job.prompt)
