"""Generations as server-sent events: what fresh and re-attached streams have in common."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing

from gateway.http.exchange import Exchange
from gateway.openai.replies import Echo, Stream, Usage
from gateway.requests.merge import merged
from gateway.requests.stream import Accepted, Delta, Done, Explained, Finished, Generation


async def send_stream(
    exchange: Exchange,
    stream: Stream,
    generations: Sequence[Generation],
    echoes: Sequence[Echo],
    ping_s: float,
) -> Usage:
    """Every event but the last one, which is the caller's. Returns the usage for it."""
    usage = Usage()
    await exchange.start_events()
    async with exchange.pinged(ping_s), aclosing(merged(generations)) as batches:
        async for base, events in batches:
            chunks = []
            for event in events:
                if isinstance(event, Explained):
                    _, echo = prompt_at(base, generations, echoes)
                    # It takes as long as a thousand deltas.
                    chunks.append(await asyncio.to_thread(stream.explained, base, event, echo))
                else:
                    chunks.append(_chunk(stream, base, event, generations, echoes, usage))
            if any(chunks):
                await exchange.send_events(b"".join(chunks))
    return usage


def prompt_at(
    base: int, generations: Sequence[Generation], echoes: Sequence[Echo]
) -> tuple[int, Echo]:
    """How many choices the prompt has whose first one is `base`, and what they show of it."""
    for generation, echo in zip(generations, echoes, strict=True):
        if base == 0:
            return len(generation.choices), echo
        base -= len(generation.choices)
    raise AssertionError("no prompt begins there")


def _chunk(
    stream: Stream,
    base: int,
    event: Accepted | Delta | Finished | Done,
    generations: Sequence[Generation],
    echoes: Sequence[Echo],
    usage: Usage,
) -> bytes:
    match event:
        case Delta():
            return stream.delta(base + event.choice, event)
        case Finished():
            return stream.finished(base + event.choice, event)
        case Done():
            usage.add(event.message)
            return b""
        case Accepted():
            n, echo = prompt_at(base, generations, echoes)
            return b"".join(stream.opening(base + index, echo) for index in range(n))
