"""How long a file may take to come in."""

import asyncio
from typing import Any

import pytest

from gateway.http import connection
from gateway.http.errors import HttpError
from gateway.openai.batches.upload import Upload

HEAD = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
SCOPE = {"type": "http", "headers": [(b"content-type", b"multipart/form-data; boundary=x")]}


@pytest.mark.parametrize(("bytes_per_s", "is_there"), [(1, True), (1 << 20, False)])
async def test_it_has_more_time_the_more_of_it_there_is(
    bytes_per_s: int, is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first part comes at once, the last after twice the time that a small body has."""
    monkeypatch.setattr(connection, "BODY_BYTES_PER_S", bytes_per_s)
    parts = [HEAD + b"first ", b"last\r\n--x--\r\n"]

    async def receive() -> dict[str, Any]:
        if len(parts) == 1:
            await asyncio.sleep(0.2)
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    upload = Upload(SCOPE, receive, file_bytes_max=100, read_s_max=0.1)
    if is_there:
        assert [chunk async for chunk in upload.chunks(lambda _: None)] == [b"first last"]
    else:
        with pytest.raises(HttpError, match=r"within 0\.1 s, and a second for each 1024 KiB"):
            [_ async for _ in upload.chunks(lambda _: None)]
