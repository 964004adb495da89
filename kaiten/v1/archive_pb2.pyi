from kaiten.v1 import ledger_pb2 as _ledger_pb2
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
    __slots__ = ("header", "request", "record", "gap", "block")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    header: ArchiveHeader
    request: ArchivedRequest
    record: _ledger_pb2.JournalRecord
    gap: ArchiveGap
    block: FilledBlock
    def __init__(self, header: _Optional[_Union[ArchiveHeader, _Mapping]] = ..., request: _Optional[_Union[ArchivedRequest, _Mapping]] = ..., record: _Optional[_Union[_ledger_pb2.JournalRecord, _Mapping]] = ..., gap: _Optional[_Union[ArchiveGap, _Mapping]] = ..., block: _Optional[_Union[FilledBlock, _Mapping]] = ...) -> None: ...

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
    __slots__ = ("entry_id", "sequence_id", "submit", "choices", "prompt_tokens", "block_hashes")
    ENTRY_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    entry_id: str
    sequence_id: int
    submit: _ledger_pb2.SubmitRecord
    choices: _containers.RepeatedCompositeFieldContainer[ResumedChoice]
    prompt_tokens: int
    block_hashes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, entry_id: _Optional[str] = ..., sequence_id: _Optional[int] = ..., submit: _Optional[_Union[_ledger_pb2.SubmitRecord, _Mapping]] = ..., choices: _Optional[_Iterable[_Union[ResumedChoice, _Mapping]]] = ..., prompt_tokens: _Optional[int] = ..., block_hashes: _Optional[_Iterable[int]] = ...) -> None: ...

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
