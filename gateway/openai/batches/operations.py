"""/v1/batches: many requests in a file, answered within a day, behind all that is live."""

import re
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, Final, Literal, get_args

import msgspec
from msgspec import Meta, Struct
from pydantic import Field

from gateway.http.exchange import HttpExchange
from gateway.openai.batches.files import FILE_ID, PURPOSE
from gateway.openai.batches.lines import ENDPOINTS
from gateway.openai.listing import Listing, asked_page, ids_of_page, listed, told_page
from gateway.openai.operation import LOOKS, READS, Api, Operation, named, parameter
from gateway.openai.request_body import RequestBody, check_metadata
from gateway.openai.responses.reply import ResponseUsage
from gateway.openai.usage import Count
from ledger.batches.batches import LIVE, BatchName, StoredBatch
from service_kit.errors import AlreadyExists, InvalidRequest, NotFound

BATCH_ID: Final = re.compile(r"batch_[0-9a-f]{24}", re.ASCII)
WINDOW_S: Final = 24 * 3600
BATCHES: Final = 20
BATCHES_MAX: Final = 100
Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling",
    "cancelled",
]  # fmt: skip
MOMENTS: Final = frozenset(
    ("created_at", "expires_at", *(f"{state}_at" for state in get_args(Status)))
)
Moment = Annotated[int, Meta(ge=0)] | None


class ExpiresAfter(RequestBody):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=1, lt=1_000_000_000)]


class BatchBody(RequestBody):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = None
    """Yours: told again with the batch. At most 16 of 64 and 512 characters."""
    output_expires_after: ExpiresAfter | None = None
    """Of its outputs, which leave when the gateway's setting says if that is sooner."""


class BatchProblem(Struct, kw_only=True):
    code: Literal["invalid_file"] = "invalid_file"
    message: str
    param: None = None
    line: None = None


class BatchProblems(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[BatchProblem]


class RequestCounts(Struct):
    total: Count
    completed: Count
    failed: Count


class Batch(Struct, kw_only=True):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchProblems | None = None
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: Status
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: Count
    in_progress_at: Moment = None
    expires_at: Moment = None
    finalizing_at: Moment = None
    completed_at: Moment = None
    failed_at: Moment = None
    expired_at: Moment = None
    cancelling_at: Moment = None
    cancelled_at: Moment = None
    request_counts: RequestCounts
    # Of all lines that were answered, once it is over.
    model: str | None = None
    usage: ResponseUsage | None = None
    metadata: dict[str, str]


class BatchList(Listing, kw_only=True):
    data: list[Batch]


async def create_batch(api: Api, exchange: HttpExchange, body: BatchBody) -> None:
    tenant, ledger = exchange.tenant.name, api.link.ledger
    check_metadata(body.metadata)
    name = BatchName(tenant, f"batch_{exchange.new_id()}")
    fields = {
        "endpoint": body.endpoint,
        "input_file_id": body.input_file_id,
        "metadata": msgspec.json.encode(body.metadata or {}).decode(),
        # 0: as long as any.
        "output_ttl_s": str(body.output_expires_after.seconds if body.output_expires_after else 0),
    }
    with suppress(NotFound):
        await exchange.send_json(200, told(await _of_fields(api, name, fields)))
        return
    if not FILE_ID.fullmatch(body.input_file_id):
        raise InvalidRequest("input_file_id", f"must match {FILE_ID.pattern}")
    try:
        file = await ledger.files.find(tenant, body.input_file_id)
    except NotFound as error:
        rule = f"names {body.input_file_id!r}, which is not here: {error.why}"
        raise InvalidRequest("input_file_id", rule) from None
    if file.purpose != PURPOSE:
        raise InvalidRequest("input_file_id", "must be of a file whose purpose is 'batch'")
    await ledger.batches.new(name, fields, window_s=WINDOW_S)
    api.on_batch()
    # Somebody else may have made another of the same key meanwhile.
    await exchange.send_json(200, told(await _of_fields(api, name, fields)))


async def _of_fields(api: Api, name: BatchName, fields: Mapping[str, str]) -> StoredBatch:
    """NotFound. AlreadyExists: it was made of others."""
    found = await api.link.ledger.batches.find(name)
    if fields != {field: found.fields.get(field, "0") for field in fields}:
        raise AlreadyExists(f"batch {name.id!r}")
    return found


async def get_batch(api: Api, exchange: HttpExchange, _body: None) -> None:
    await exchange.send_json(200, told(await api.link.ledger.batches.find(_name(exchange))))


async def cancel_batch(api: Api, exchange: HttpExchange, _body: None) -> None:
    """What is answered so far stays. One that is over is told as it is."""
    name, batches = _name(exchange), api.link.ledger.batches
    of = tuple(state for state in LIVE if state != "finalizing")
    await batches.move(name, "cancelling", of=of)
    await exchange.send_json(200, told(await batches.find(name)))


async def list_batches(api: Api, exchange: HttpExchange, _body: None) -> None:
    batches, tenant = api.link.ledger.batches, exchange.tenant.name
    asked = asked_page(exchange, most=BATCHES_MAX, default=BATCHES)
    ids, has_more = await ids_of_page(partial(batches.page, tenant), asked)
    shown = [told(each) async for each in batches.some(tenant, ids)]
    await exchange.send_json(200, BatchList(**told_page(shown, has_more=has_more)))


def _name(exchange: HttpExchange) -> BatchName:
    id = exchange.path["id"]
    if not BATCH_ID.fullmatch(id):
        raise InvalidRequest("id", f"must match {BATCH_ID.pattern}")
    return BatchName(exchange.tenant.name, id)


def told(stored: StoredBatch) -> Batch:
    fields = stored.fields
    moments: dict[str, Any] = {
        name: int(value) for name, value in fields.items() if name in MOMENTS
    }
    problem, usage = fields.get("problem"), fields.get("usage")
    errors = BatchProblems(data=[BatchProblem(message=problem)]) if problem else None
    names = ("total", "completed", "failed")
    return Batch(
        id=stored.name.id,
        endpoint=fields["endpoint"],
        errors=errors,
        input_file_id=fields["input_file_id"],
        status=stored.status,  # type: ignore[arg-type]
        output_file_id=fields.get("output_file_id"),
        error_file_id=fields.get("errors_file_id"),
        model=fields.get("model"),
        usage=msgspec.json.decode(usage, type=ResponseUsage) if usage else None,
        request_counts=RequestCounts(*(stored.number(name) for name in names)),
        metadata=msgspec.json.decode(fields["metadata"], type=dict[str, str]),
        **moments,
    )


CREATES: Final = (409, *READS)
ALL: Final = "/v1/batches"
PATH: Final = f"{ALL}/{{id}}"
ID: Final = parameter("path", "id", BATCH_ID.pattern, "as its answer has it")
LISTED: Final = listed(BATCHES_MAX, BATCHES)
assert set(ENDPOINTS) == {"/v1/chat/completions", "/v1/completions", "/v1/responses"}
OPERATIONS: Final = (
    Operation(
        "POST",
        "/v1/batches",
        "createBatch",
        create_batch,
        CREATES,
        (Batch,),
        (named("batch"),),
        BatchBody,
    ),
    Operation("GET", ALL, "listBatches", list_batches, LOOKS, (BatchList,), LISTED),
    Operation("GET", PATH, "getBatch", get_batch, LOOKS, (Batch,), (ID,)),
    Operation("POST", f"{PATH}/cancel", "cancelBatch", cancel_batch, LOOKS, (Batch,), (ID,)),
)
