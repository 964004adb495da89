"""Requests that cost more than they are, and connections that take their time: what abusers send.

Bodies by phase, and a coroutine that sends them until it is killed. See `benchmarks.faults.abuse`.
"""

import asyncio
from contextlib import suppress
from typing import Final

import httpx

JSON: Final = {"content-type": "application/json"}
COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
# As many as a body may have.
VALUES: Final = (1 << 18) - 100
SPECIAL: Final = "</s>"
SLOW: Final = 400
BODIES: Final = 48
Body = tuple[str, bytes]


def lists() -> list[Body]:
    """Wrong at the end, wrong everywhere, and right, in every field that takes a list."""
    wrong = b'{"prompt":"x","%s":[' + b"1," * VALUES + b"null]}"
    fields = (b"stop", b"stop_token_ids", b"allowed_token_ids", b"bad_words_token_ids")
    keys = ",".join(f'"{index}":1' for index in range(30_000)).encode()
    return [
        (COMPLETIONS, b'{"prompt":[' + b"1," * 900_000 + b"null]}"),
        (COMPLETIONS, b'{"prompt":[' + b"1," * VALUES + b"null]}"),
        (COMPLETIONS, b'{"prompt":[[' + b"1," * VALUES + b"null]]}"),
        (COMPLETIONS, b'{"prompt":[' + b"1.5," * VALUES + b"1]}"),
        (COMPLETIONS, b'{"prompt":[' + b"257," * VALUES + b"1]}"),
        (COMPLETIONS, b'{"prompt":[' + b"150000," * VALUES + b"1]}"),
        (COMPLETIONS, b'{"prompt":[' + b"[1]," * 16_000 + b"[null]]}"),
        *((COMPLETIONS, wrong % field) for field in fields),
        (COMPLETIONS, b'{"prompt":"x","logit_bias":{' + keys + b"}}"),
        (COMPLETIONS, b'{"prompt":"' + b"\\n" * 4_000_000 + b'"}'),
        (CHAT, b'{"messages":[' + b"{}," * 16_000 + b"null]}"),
        (CHAT, b'{"messages":[{' + keys + b"}]}"),
        (CHAT, b'{"messages":[{"role":"user","content":[' + b"1," * VALUES + b"null]}]}"),
        ("/detokenize", b'{"tokens":[' + b"1," * VALUES + b"null]}"),
    ]


def controls(text_bytes: int) -> list[Body]:
    """Control tokens' texts, and what almost is one, as much as a context lets in."""
    head, tail = b'{"messages":[{"role":"user","content":"', b'"}]}'
    return [
        (path, head + part * (text_bytes // len(part)) + tail)
        for part in (SPECIAL.encode(), SPECIAL.encode() + b"a", b"<", SPECIAL[:-1].encode())
        for path in (CHAT, "/tokenize")
    ]


def too_large() -> list[Body]:
    return [(COMPLETIONS, b'{"prompt":"' + b"x" * 25_000_000 + b'"}')]


async def send(url: str, bodies: list[Body]) -> None:
    """One after the other, again and again."""
    async with httpx.AsyncClient(base_url=url, timeout=60, headers=JSON) as http:
        while True:
            for path, body in bodies:
                with suppress(httpx.TransportError):
                    await http.post(path, content=body)


async def send_at_once(url: str) -> None:
    """Many as large as they may be, all the time."""
    body = b'{"prompt":"' + b"x" * 8_000_000 + b'"}'
    await asyncio.gather(*(send(url, [(COMPLETIONS, body)]) for _ in range(BODIES)))


async def send_slowly(url: str) -> None:
    """Half headers and half bodies, a byte now and then, a new connection for each that is cut."""
    host, port = url.removeprefix("http://").split(":")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n"
    head += b"Content-Type: application/json\r\n"

    async def one(begin: bytes) -> None:
        while True:
            with suppress(OSError):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(begin)
                while not reader.at_eof():
                    writer.write(b"x")
                    await writer.drain()
                    with suppress(TimeoutError):
                        await asyncio.wait_for(reader.read(1 << 16), 1)
                writer.close()

    halves = (head, head + b"\r\n")
    await asyncio.gather(*(one(halves[index % 2]) for index in range(SLOW)))
