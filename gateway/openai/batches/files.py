"""/v1/files: what batches read and write, by tenant, for a time."""

import asyncio
import re
from codecs import BOM_UTF8
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final, Literal

from msgspec import Struct
from starlette.datastructures import QueryParams
from starlette.types import Receive

from gateway.http.exchange import HttpExchange, gone_already
from gateway.openai.batches.upload import Upload, new_file_id
from gateway.openai.listing import Listing, asked_page, ids_of_page, listed, told_page
from gateway.openai.operation import LOOKS, READS, Api, Operation, parameter
from gateway.openai.usage import Count
from ledger.batches.files import FILES_MAX, StoredFile
from service_kit.errors import InvalidRequest, NotFound, Overloaded, Unavailable

FILE_ID: Final = re.compile(r"file-[0-9a-f]{24}(-output|-errors)?", re.ASCII)
PURPOSE: Final = "batch"
JSONL: Final = "application/jsonl"
ANCHOR, SECONDS = "expires_after[anchor]", "expires_after[seconds]"
FIELDS: Final = frozenset({"purpose", ANCHOR, SECONDS})
TTL_S: Final = re.compile(r"[1-9][0-9]{0,8}", re.ASCII)
LINES_AT_ONCE: Final = 256


class FileObject(Struct, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    bytes: Count
    created_at: Count
    expires_at: Count
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"


class FileList(Listing, kw_only=True):
    data: list[FileObject]


class DeletedFile(Struct, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


async def upload_file(api: Api, exchange: HttpExchange, receive: Receive) -> None:
    """Pieces go to the store as they come; only a whole file is one."""
    upload = Upload(
        exchange.scope,
        receive,
        file_bytes_max=api.link.limits.files_bytes_max,
        read_s_max=api.config.body_s_max,
    )
    try:
        stored = await _taken_in(api, exchange.tenant.name, upload)
    except Exception:
        await upload.drop()
        raise
    await exchange.send_json(200, told(stored))


async def _taken_in(api: Api, tenant: str, upload: Upload) -> StoredFile:
    files, id, count = api.link.ledger.files, new_file_id(), 0
    try:
        with _counted(api, tenant) as count_bytes:
            async for chunk in upload.chunks(count_bytes):
                await files.put(tenant, id, count, chunk)
                count += 1
            _check(upload)
            return await files.keep(
                tenant,
                id,
                filename=upload.filename or "",
                purpose=PURPOSE,
                size_bytes=upload.size_bytes,
                chunks=count,
                ttl_s=_ttl_s(upload),
            )
    except Exception:
        await _forget(api, tenant, id, count)
        raise


@contextmanager
def _counted(api: Api, tenant: str) -> Iterator[Callable[[int], None]]:
    """Pieces lie in the store before their file counts: all that come in at once are bounded."""
    limit, own = api.link.limits.files_bytes_max, 0

    def count(size_bytes: int) -> None:
        nonlocal own
        own += size_bytes
        api.uploading[tenant] += size_bytes
        if (live := api.uploading[tenant]) > limit:
            raise Overloaded(
                f"too many bytes of files of tenant {tenant} are coming in",
                1.0,
                limit,
                live=live,
                subject="tenant",
                rule="files_mb",
                tenant=tenant,
            )

    try:
        yield count
    finally:
        api.uploading[tenant] -= own
        if not api.uploading[tenant]:
            del api.uploading[tenant]


async def _forget(api: Api, tenant: str, id: str, chunks: int) -> None:
    """Pieces that nothing came of. What stays behind leaves by itself."""
    # No file is made of them, but they are gone.
    with suppress(NotFound, Unavailable):
        await api.link.ledger.files.drop(tenant, id, chunks)


def _check(upload: Upload) -> None:
    unknown = next((name for name in upload.fields if name not in FIELDS), None)
    if unknown is not None:
        raise InvalidRequest(unknown[:64] or "body", "is not a known field")
    if upload.filename is None:
        raise InvalidRequest("file", "is required")
    if not upload.size_bytes:
        raise InvalidRequest("file", "must not be empty")
    purpose = upload.fields.get("purpose", "")
    if purpose != PURPOSE:
        raise InvalidRequest("purpose", f"must be {PURPOSE!r}, got {purpose[:64]!r}")


def _ttl_s(upload: Upload) -> int | None:
    """How long it is to be kept, if it says."""
    anchor, seconds = (upload.fields.get(name) for name in (ANCHOR, SECONDS))
    if anchor not in (None, "created_at"):
        raise InvalidRequest(ANCHOR, f"must be 'created_at', got {anchor[:64]!r}")
    if seconds is None:
        return None
    if not TTL_S.fullmatch(seconds):
        raise InvalidRequest(SECONDS, f"must match {TTL_S.pattern}, got {seconds[:64]!r}")
    return int(seconds)


async def list_files(api: Api, exchange: HttpExchange, _body: None) -> None:
    files, tenant = api.link.ledger.files, exchange.tenant.name
    purpose = QueryParams(exchange.scope["query_string"]).get("purpose", "")
    asked = asked_page(exchange, most=FILES_MAX, default=FILES_MAX)
    ids, has_more = await ids_of_page(partial(files.page, tenant, purpose=purpose), asked)
    shown = [told(each) async for each in files.some(tenant, ids)]
    await exchange.send_json(200, FileList(**told_page(shown, has_more=has_more)))


async def get_file(api: Api, exchange: HttpExchange, _body: None) -> None:
    await exchange.send_json(200, told(await _found(api, exchange)))


async def get_content(api: Api, exchange: HttpExchange, _body: None) -> None:
    stored, tenant = await _found(api, exchange), exchange.tenant.name
    pieces = api.link.ledger.files.read(tenant, stored)
    await exchange.send_stream(JSONL, stored.size_bytes, pieces)


async def delete_file(api: Api, exchange: HttpExchange, _body: None) -> None:
    with gone_already(exchange):
        stored = await _found(api, exchange)
        # Not found: it was there just now.
        with suppress(NotFound):
            await api.link.ledger.files.drop(exchange.tenant.name, stored.id, stored.chunks)
    await exchange.send_json(200, DeletedFile(id=exchange.path["id"]))


async def _found(api: Api, exchange: HttpExchange) -> StoredFile:
    id = exchange.path["id"]
    if not FILE_ID.fullmatch(id):
        raise InvalidRequest("id", f"must match {FILE_ID.pattern}")
    return await api.link.ledger.files.find(exchange.tenant.name, id)


def told(stored: StoredFile) -> FileObject:
    return FileObject(
        id=stored.id,
        bytes=stored.size_bytes,
        created_at=stored.created_at,
        expires_at=stored.expires_at,
        filename=stored.filename,
        purpose="batch" if stored.purpose == PURPOSE else "batch_output",
    )


class TooManyLines(Exception):
    """A file has more lines than it may have."""


async def at_most(lines_max: int, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The pieces of a file, counted before anybody looks at their lines. TooManyLines."""
    count = 0
    async for piece in pieces:
        count += piece.count(b"\n")
        if count + (not piece.endswith(b"\n")) > lines_max:
            rule = f"must have at most {lines_max} lines, empty ones counted"
            raise TooManyLines(f"the input file {rule}; it has more")
        yield piece


async def lines_of(pieces: AsyncIterator[bytes], line_bytes_max: int) -> AsyncIterator[bytes]:
    """Of a file, without their ends and the mark that some editors begin a file with.

    One that is longer comes as it is up to the limit.
    """
    rest, count, mark = b"", 0, BOM_UTF8
    async for piece in pieces:
        found, at = rest + piece, 0
        while (end := found.find(b"\n", at)) >= 0:
            yield found[at:end].removeprefix(mark)
            at, count, mark = end + 1, count + 1, b""
            # A megabyte may be a million lines.
            if count % LINES_AT_ONCE == 0:
                await asyncio.sleep(0)
        rest = found[at : at + line_bytes_max + 1]
    if rest := rest.removeprefix(mark):
        yield rest


PATH: Final = "/v1/files/{id}"
FORM: Final = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary", "description": "a request per line"},
        "purpose": {"enum": [PURPOSE]},
        ANCHOR: {"enum": ["created_at"]},
        SECONDS: {
            "type": "string",
            "pattern": f"^{TTL_S.pattern}$",
            "description": "how long to keep it, --files-hours at most",
        },
    },
    "additionalProperties": False,
}
ID: Final = parameter("path", "id", FILE_ID.pattern, "as its answer has it")
LISTED: Final = (
    parameter("query", "purpose", "", "batch or batch_output; all if left out"),
    *listed(FILES_MAX, FILES_MAX),
)
OPERATIONS: Final = (
    Operation("POST", "/v1/files", "uploadFile", upload_file, READS, (FileObject,), upload=FORM),
    Operation("GET", "/v1/files", "listFiles", list_files, LOOKS, (FileList,), LISTED),
    Operation("GET", PATH, "getFile", get_file, LOOKS, (FileObject,), (ID,)),
    Operation("GET", f"{PATH}/content", "getFileContent", get_content, LOOKS, (JSONL,), (ID,)),
    Operation("DELETE", PATH, "deleteFile", delete_file, LOOKS, (DeletedFile,), (ID,)),
)
