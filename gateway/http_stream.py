"""Generations as server-sent events: what fresh and re-attached streams have in common."""

from collections.abc import Sequence
from contextlib import aclosing

from gateway.generation import Accepted, Delta, Done, Event, Finished, Generation
from gateway.http_io import Exchange
from gateway.merge import merged
from gateway.openai_format import Stream, Usage


async def send_stream(
    exchange: Exchange,
    stream: Stream,
    generations: Sequence[Generation],
    echoes: Sequence[str],
    ping_s: float,
) -> Usage:
    """Every event but the last one, which is the caller's. Returns the usage for it."""
    usage = Usage()
    await exchange.start_events()
    async with exchange.pinged(ping_s), aclosing(merged(generations)) as batches:
        async for base, events in batches:
            chunks = [_chunk(stream, base, event, generations, echoes, usage) for event in events]
            if any(chunks):
                await exchange.send_events(b"".join(chunks))
    return usage


def opened(
    event: Accepted, generations: Sequence[Generation], echoes: Sequence[str]
) -> tuple[int, str]:
    """How many choices this event opens, and the text before theirs."""
    pairs = zip(generations, echoes, strict=True)
    return next((len(g.choices), echo) for g, echo in pairs if g.accepted is event)


def _chunk(
    stream: Stream,
    base: int,
    event: Event,
    generations: Sequence[Generation],
    echoes: Sequence[str],
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
            n, echo = opened(event, generations, echoes)
            return b"".join(stream.opening(base + index, echo) for index in range(n))
