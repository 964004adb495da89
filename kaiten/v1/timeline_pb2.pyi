from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TimelinePhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIMELINE_PHASE_UNSPECIFIED: _ClassVar[TimelinePhase]
    TIMELINE_PHASE_QUEUE: _ClassVar[TimelinePhase]
    TIMELINE_PHASE_PREFILL: _ClassVar[TimelinePhase]
    TIMELINE_PHASE_DECODE: _ClassVar[TimelinePhase]
    TIMELINE_PHASE_UNKNOWN: _ClassVar[TimelinePhase]
    TIMELINE_PHASE_STALL: _ClassVar[TimelinePhase]
    TIMELINE_PHASE_ACCEPT: _ClassVar[TimelinePhase]
    TIMELINE_PHASE_COMMIT: _ClassVar[TimelinePhase]
    TIMELINE_PHASE_DELIVER: _ClassVar[TimelinePhase]
    TIMELINE_PHASE_READER: _ClassVar[TimelinePhase]
TIMELINE_PHASE_UNSPECIFIED: TimelinePhase
TIMELINE_PHASE_QUEUE: TimelinePhase
TIMELINE_PHASE_PREFILL: TimelinePhase
TIMELINE_PHASE_DECODE: TimelinePhase
TIMELINE_PHASE_UNKNOWN: TimelinePhase
TIMELINE_PHASE_STALL: TimelinePhase
TIMELINE_PHASE_ACCEPT: TimelinePhase
TIMELINE_PHASE_COMMIT: TimelinePhase
TIMELINE_PHASE_DELIVER: TimelinePhase
TIMELINE_PHASE_READER: TimelinePhase

class ChoiceTimeline(_message.Message):
    __slots__ = ("choice", "sequence_id", "ended", "num_preemptions", "intervals", "num_batch_mates", "batch_mate_ids", "latency_ns")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    INTERVALS_FIELD_NUMBER: _ClassVar[int]
    NUM_BATCH_MATES_FIELD_NUMBER: _ClassVar[int]
    BATCH_MATE_IDS_FIELD_NUMBER: _ClassVar[int]
    LATENCY_NS_FIELD_NUMBER: _ClassVar[int]
    choice: int
    sequence_id: int
    ended: str
    num_preemptions: int
    intervals: _containers.RepeatedCompositeFieldContainer[TimelineInterval]
    num_batch_mates: int
    batch_mate_ids: _containers.RepeatedScalarFieldContainer[str]
    latency_ns: int
    def __init__(self, choice: _Optional[int] = ..., sequence_id: _Optional[int] = ..., ended: _Optional[str] = ..., num_preemptions: _Optional[int] = ..., intervals: _Optional[_Iterable[_Union[TimelineInterval, _Mapping]]] = ..., num_batch_mates: _Optional[int] = ..., batch_mate_ids: _Optional[_Iterable[str]] = ..., latency_ns: _Optional[int] = ...) -> None: ...

class TimelineInterval(_message.Message):
    __slots__ = ("phase", "start_unix_ns", "end_unix_ns", "why", "behind_sequence_id", "worker_id", "num_cached_tokens", "chunk_tokens", "num_steps", "gap_p50_ns", "longest_gaps", "batch_mates", "num_blocks", "num_shared_blocks", "stalled_by_sequence_id", "behind_id", "stalled_by_id", "num_swapped_in_blocks")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    START_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    END_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    BEHIND_SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    GAP_P50_NS_FIELD_NUMBER: _ClassVar[int]
    LONGEST_GAPS_FIELD_NUMBER: _ClassVar[int]
    BATCH_MATES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STALLED_BY_SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    BEHIND_ID_FIELD_NUMBER: _ClassVar[int]
    STALLED_BY_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAPPED_IN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    phase: TimelinePhase
    start_unix_ns: int
    end_unix_ns: int
    why: str
    behind_sequence_id: int
    worker_id: str
    num_cached_tokens: int
    chunk_tokens: _containers.RepeatedScalarFieldContainer[int]
    num_steps: int
    gap_p50_ns: int
    longest_gaps: _containers.RepeatedCompositeFieldContainer[TimelineGap]
    batch_mates: int
    num_blocks: int
    num_shared_blocks: int
    stalled_by_sequence_id: int
    behind_id: str
    stalled_by_id: str
    num_swapped_in_blocks: int
    def __init__(self, phase: _Optional[_Union[TimelinePhase, str]] = ..., start_unix_ns: _Optional[int] = ..., end_unix_ns: _Optional[int] = ..., why: _Optional[str] = ..., behind_sequence_id: _Optional[int] = ..., worker_id: _Optional[str] = ..., num_cached_tokens: _Optional[int] = ..., chunk_tokens: _Optional[_Iterable[int]] = ..., num_steps: _Optional[int] = ..., gap_p50_ns: _Optional[int] = ..., longest_gaps: _Optional[_Iterable[_Union[TimelineGap, _Mapping]]] = ..., batch_mates: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_shared_blocks: _Optional[int] = ..., stalled_by_sequence_id: _Optional[int] = ..., behind_id: _Optional[str] = ..., stalled_by_id: _Optional[str] = ..., num_swapped_in_blocks: _Optional[int] = ...) -> None: ...

class TimelineGap(_message.Message):
    __slots__ = ("end_unix_ns", "gap_ns", "rows", "prompt_tokens")
    END_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    GAP_NS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    end_unix_ns: int
    gap_ns: int
    rows: int
    prompt_tokens: int
    def __init__(self, end_unix_ns: _Optional[int] = ..., gap_ns: _Optional[int] = ..., rows: _Optional[int] = ..., prompt_tokens: _Optional[int] = ...) -> None: ...
