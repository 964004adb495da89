"""Do peers compute the same model? The very tokens of a few jobs, asked for after the load."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import httpx

from kaiten.bench.workload import Job
from kaiten.client import AsyncClient

CHECKED: Final = 4
ANSWER_S_MAX: Final = 120.0
AskTokens = Callable[[str, Job], Awaitable[list[int]]]


class TokensError(Exception):
    """A server gave no token ids."""


def agreement(tokens: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> float:
    """How far both go the same way: tokens before the first difference, of all tokens compared.

    Greedy choices differ for good once two nearly equal logits change places; with rounded
    weights or sums that is a matter of time, in fp32 it should not happen.
    """
    pairs = list(zip(tokens, others, strict=False))
    same = sum(_same(a, b) for a, b in pairs)
    total = sum(max(len(a), len(b)) for a, b in pairs)
    return same / total if total else 0.0


def _same(tokens: Sequence[int], others: Sequence[int]) -> int:
    for count, (a, b) in enumerate(zip(tokens, others, strict=False)):
        if a != b:
            return count
    return min(len(tokens), len(others))


async def tokens_of_kaiten(address: str, job: Job) -> list[int]:
    async with (
        AsyncClient(address) as client,
        client.generate(
            token_ids=job.prompt,
            max_tokens=job.output_tokens,
            min_tokens=job.output_tokens,
            ignore_eos=True,
            temperature=0.0,
            return_token_ids=True,
        ) as generation,
    ):
        whole = await generation.result()
        return list(whole.choices[0].token_ids)


async def tokens_of_openai(url: str, job: Job) -> list[int]:
    """From a server that gives token ids beside the text."""
    extras = {"ignore_eos": True, "min_tokens": job.output_tokens, "return_token_ids": True}
    body = {"model": await _model(url), "max_tokens": job.output_tokens, "temperature": 0}
    answer = await _post(f"{url}/v1/completions", {**body, "prompt": list(job.prompt), **extras})
    return _ids(answer["choices"][0].get("token_ids"))


async def tokens_of_llama_cpp(url: str, job: Job) -> list[int]:
    """By its own endpoint; the OpenAI one gives text only."""
    body = {"prompt": list(job.prompt), "n_predict": job.output_tokens, "temperature": 0}
    extras = {"ignore_eos": True, "return_tokens": True}
    return _ids((await _post(f"{url}/completion", {**body, **extras})).get("tokens"))


async def _model(url: str) -> str:
    async with httpx.AsyncClient(trust_env=False) as http:
        answer = await http.get(f"{url}/v1/models", timeout=ANSWER_S_MAX)
    return str(answer.json()["data"][0]["id"])


async def _post(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    async with httpx.AsyncClient(trust_env=False) as http:
        try:
            answer = await http.post(url, json=body, timeout=ANSWER_S_MAX)
        except httpx.HTTPError as error:
            raise TokensError(f"{url}: {error!r}") from error
    if answer.status_code != 200:
        raise TokensError(f"{url}: {answer.status_code} {answer.text[:300]}")
    found: dict[str, Any] = answer.json()
    return found


def _ids(found: object) -> list[int]:
    if not isinstance(found, list) or not found:
        raise TokensError("the server gave no token ids")
    return [int(each) for each in found]
