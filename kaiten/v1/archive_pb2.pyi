from kaiten.v1 import common_pb2 as _common_pb2
from kaiten.v1 import ledger_pb2 as _ledger_pb2
from kaiten.v1 import timeline_pb2 as _timeline_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ArchiveChunk(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[ArchiveEntry]
    def __init__(self, entries: _Optional[_Iterable[_Union[ArchiveEntry, _Mapping]]] = ...) -> None: ...

class ArchiveEntry(_message.Message):
    __slots__ = ("header", "request", "record", "gap", "block", "snapshot")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    header: ArchiveHeader
    request: ArchivedRequest
    record: _ledger_pb2.JournalRecord
    gap: ArchiveGap
    block: FilledBlock
    snapshot: Snapshot
    def __init__(self, header: _Optional[_Union[ArchiveHeader, _Mapping]] = ..., request: _Optional[_Union[ArchivedRequest, _Mapping]] = ..., record: _Optional[_Union[_ledger_pb2.JournalRecord, _Mapping]] = ..., gap: _Optional[_Union[ArchiveGap, _Mapping]] = ..., block: _Optional[_Union[FilledBlock, _Mapping]] = ..., snapshot: _Optional[_Union[Snapshot, _Mapping]] = ...) -> None: ...

class ArchiveHeader(_message.Message):
    __slots__ = ("format", "version", "cell", "epoch", "journal_seq", "segment", "configured", "has_tokens", "block_tokens", "unix_ns", "after_seq", "store", "has_outcomes")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CELL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_SEQ_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    CONFIGURED_FIELD_NUMBER: _ClassVar[int]
    HAS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQ_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    HAS_OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    format: int
    version: str
    cell: str
    epoch: int
    journal_seq: int
    segment: int
    configured: _ledger_pb2.ConfiguredInput
    has_tokens: bool
    block_tokens: int
    unix_ns: int
    after_seq: int
    store: str
    has_outcomes: bool
    def __init__(self, format: _Optional[int] = ..., version: _Optional[str] = ..., cell: _Optional[str] = ..., epoch: _Optional[int] = ..., journal_seq: _Optional[int] = ..., segment: _Optional[int] = ..., configured: _Optional[_Union[_ledger_pb2.ConfiguredInput, _Mapping]] = ..., has_tokens: bool = ..., block_tokens: _Optional[int] = ..., unix_ns: _Optional[int] = ..., after_seq: _Optional[int] = ..., store: _Optional[str] = ..., has_outcomes: bool = ...) -> None: ...

class ArchivedRequest(_message.Message):
    __slots__ = ("entry_id", "sequence_id", "submit", "choices", "prompt_tokens", "block_hashes", "snapshot_seq")
    ENTRY_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_SEQ_FIELD_NUMBER: _ClassVar[int]
    entry_id: str
    sequence_id: int
    submit: _ledger_pb2.SubmitRecord
    choices: _containers.RepeatedCompositeFieldContainer[ResumedChoice]
    prompt_tokens: int
    block_hashes: _containers.RepeatedScalarFieldContainer[int]
    snapshot_seq: int
    def __init__(self, entry_id: _Optional[str] = ..., sequence_id: _Optional[int] = ..., submit: _Optional[_Union[_ledger_pb2.SubmitRecord, _Mapping]] = ..., choices: _Optional[_Iterable[_Union[ResumedChoice, _Mapping]]] = ..., prompt_tokens: _Optional[int] = ..., block_hashes: _Optional[_Iterable[int]] = ..., snapshot_seq: _Optional[int] = ...) -> None: ...

class ResumedChoice(_message.Message):
    __slots__ = ("token_ids", "is_finished", "tokens")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IS_FINISHED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    is_finished: bool
    tokens: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., is_finished: bool = ..., tokens: _Optional[int] = ...) -> None: ...

class FilledBlock(_message.Message):
    __slots__ = ("sequence_id", "index", "hash")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    index: int
    hash: int
    def __init__(self, sequence_id: _Optional[int] = ..., index: _Optional[int] = ..., hash: _Optional[int] = ...) -> None: ...

class ArchiveGap(_message.Message):
    __slots__ = ("first_seq", "last_seq", "requests", "reason")
    FIRST_SEQ_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    first_seq: int
    last_seq: int
    requests: int
    reason: str
    def __init__(self, first_seq: _Optional[int] = ..., last_seq: _Optional[int] = ..., requests: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("version", "seq", "now_ns", "since_ns", "lost_ns", "configured", "workers", "requests", "is_cut", "taken", "look", "store_behind_ns", "closed_ns", "closed_why", "throttled_ns")
    class ThrottledNsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    NOW_NS_FIELD_NUMBER: _ClassVar[int]
    SINCE_NS_FIELD_NUMBER: _ClassVar[int]
    LOST_NS_FIELD_NUMBER: _ClassVar[int]
    CONFIGURED_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    IS_CUT_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    LOOK_FIELD_NUMBER: _ClassVar[int]
    STORE_BEHIND_NS_FIELD_NUMBER: _ClassVar[int]
    CLOSED_NS_FIELD_NUMBER: _ClassVar[int]
    CLOSED_WHY_FIELD_NUMBER: _ClassVar[int]
    THROTTLED_NS_FIELD_NUMBER: _ClassVar[int]
    version: int
    seq: int
    now_ns: int
    since_ns: int
    lost_ns: int
    configured: _ledger_pb2.ConfiguredInput
    workers: _containers.RepeatedCompositeFieldContainer[WorkerSnapshot]
    requests: _containers.RepeatedCompositeFieldContainer[RequestSnapshot]
    is_cut: bool
    taken: _containers.RepeatedCompositeFieldContainer[ArchivedRequest]
    look: LookSnapshot
    store_behind_ns: int
    closed_ns: int
    closed_why: str
    throttled_ns: _containers.ScalarMap[str, int]
    def __init__(self, version: _Optional[int] = ..., seq: _Optional[int] = ..., now_ns: _Optional[int] = ..., since_ns: _Optional[int] = ..., lost_ns: _Optional[int] = ..., configured: _Optional[_Union[_ledger_pb2.ConfiguredInput, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[WorkerSnapshot, _Mapping]]] = ..., requests: _Optional[_Iterable[_Union[RequestSnapshot, _Mapping]]] = ..., is_cut: bool = ..., taken: _Optional[_Iterable[_Union[ArchivedRequest, _Mapping]]] = ..., look: _Optional[_Union[LookSnapshot, _Mapping]] = ..., store_behind_ns: _Optional[int] = ..., closed_ns: _Optional[int] = ..., closed_why: _Optional[str] = ..., throttled_ns: _Optional[_Mapping[str, int]] = ...) -> None: ...

class LookSnapshot(_message.Message):
    __slots__ = ("at_ns", "why", "head")
    AT_NS_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    at_ns: int
    why: str
    head: int
    def __init__(self, at_ns: _Optional[int] = ..., why: _Optional[str] = ..., head: _Optional[int] = ...) -> None: ...

class WorkerSnapshot(_message.Message):
    __slots__ = ("worker_id", "worker", "closed_why", "late_ns", "look", "step_after_ns", "step_plan_id", "step_rows", "step_prompt_tokens", "step_largest", "step_us", "plan_ids", "plan_prompt_tokens", "plan_largest")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    CLOSED_WHY_FIELD_NUMBER: _ClassVar[int]
    LATE_NS_FIELD_NUMBER: _ClassVar[int]
    LOOK_FIELD_NUMBER: _ClassVar[int]
    STEP_AFTER_NS_FIELD_NUMBER: _ClassVar[int]
    STEP_PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_ROWS_FIELD_NUMBER: _ClassVar[int]
    STEP_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_LARGEST_FIELD_NUMBER: _ClassVar[int]
    STEP_US_FIELD_NUMBER: _ClassVar[int]
    PLAN_IDS_FIELD_NUMBER: _ClassVar[int]
    PLAN_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PLAN_LARGEST_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    worker: _common_pb2.WorkerDescription
    closed_why: str
    late_ns: int
    look: LookSnapshot
    step_after_ns: _containers.RepeatedScalarFieldContainer[int]
    step_plan_id: _containers.RepeatedScalarFieldContainer[int]
    step_rows: _containers.RepeatedScalarFieldContainer[int]
    step_prompt_tokens: _containers.RepeatedScalarFieldContainer[int]
    step_largest: _containers.RepeatedScalarFieldContainer[int]
    step_us: _containers.RepeatedScalarFieldContainer[int]
    plan_ids: _containers.RepeatedScalarFieldContainer[int]
    plan_prompt_tokens: _containers.RepeatedScalarFieldContainer[int]
    plan_largest: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, worker_id: _Optional[str] = ..., worker: _Optional[_Union[_common_pb2.WorkerDescription, _Mapping]] = ..., closed_why: _Optional[str] = ..., late_ns: _Optional[int] = ..., look: _Optional[_Union[LookSnapshot, _Mapping]] = ..., step_after_ns: _Optional[_Iterable[int]] = ..., step_plan_id: _Optional[_Iterable[int]] = ..., step_rows: _Optional[_Iterable[int]] = ..., step_prompt_tokens: _Optional[_Iterable[int]] = ..., step_largest: _Optional[_Iterable[int]] = ..., step_us: _Optional[_Iterable[int]] = ..., plan_ids: _Optional[_Iterable[int]] = ..., plan_prompt_tokens: _Optional[_Iterable[int]] = ..., plan_largest: _Optional[_Iterable[int]] = ...) -> None: ...

class RequestSnapshot(_message.Message):
    __slots__ = ("id", "tenant", "sequence_id", "arrived_ns", "choices")
    ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_NS_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    id: str
    tenant: str
    sequence_id: int
    arrived_ns: int
    choices: _containers.RepeatedCompositeFieldContainer[ChoiceSnapshot]
    def __init__(self, id: _Optional[str] = ..., tenant: _Optional[str] = ..., sequence_id: _Optional[int] = ..., arrived_ns: _Optional[int] = ..., choices: _Optional[_Iterable[_Union[ChoiceSnapshot, _Mapping]]] = ...) -> None: ...

class ChoiceSnapshot(_message.Message):
    __slots__ = ("choice", "phase", "why", "worker", "slot", "num_preemptions")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    choice: int
    phase: _timeline_pb2.TimelinePhase
    why: str
    worker: int
    slot: int
    num_preemptions: int
    def __init__(self, choice: _Optional[int] = ..., phase: _Optional[_Union[_timeline_pb2.TimelinePhase, str]] = ..., why: _Optional[str] = ..., worker: _Optional[int] = ..., slot: _Optional[int] = ..., num_preemptions: _Optional[int] = ...) -> None: ...
