from kaiten.v1 import common_pb2 as _common_pb2
from kaiten.v1 import ledger_pb2 as _ledger_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SequenceState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SEQUENCE_STATE_UNSPECIFIED: _ClassVar[SequenceState]
    SEQUENCE_STATE_WAITING: _ClassVar[SequenceState]
    SEQUENCE_STATE_RUNNING: _ClassVar[SequenceState]
    SEQUENCE_STATE_PREEMPTED: _ClassVar[SequenceState]
    SEQUENCE_STATE_RETIRING: _ClassVar[SequenceState]
    SEQUENCE_STATE_FORKING: _ClassVar[SequenceState]
SEQUENCE_STATE_UNSPECIFIED: SequenceState
SEQUENCE_STATE_WAITING: SequenceState
SEQUENCE_STATE_RUNNING: SequenceState
SEQUENCE_STATE_PREEMPTED: SequenceState
SEQUENCE_STATE_RETIRING: SequenceState
SEQUENCE_STATE_FORKING: SequenceState

class WatchRequest(_message.Message):
    __slots__ = ("interval_ms", "takes_rows")
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    TAKES_ROWS_FIELD_NUMBER: _ClassVar[int]
    interval_ms: int
    takes_rows: bool
    def __init__(self, interval_ms: _Optional[int] = ..., takes_rows: bool = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("is_snapshot", "epoch", "seq", "committed_seq", "unix_ns", "configured", "workers", "worker_ids_gone", "sequences", "sequence_ids_gone", "queue", "steps", "passed", "rows")
    IS_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_SEQ_FIELD_NUMBER: _ClassVar[int]
    UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    CONFIGURED_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    WORKER_IDS_GONE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_GONE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PASSED_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    is_snapshot: bool
    epoch: int
    seq: int
    committed_seq: int
    unix_ns: int
    configured: _ledger_pb2.ConfiguredInput
    workers: _containers.RepeatedCompositeFieldContainer[WatchedWorker]
    worker_ids_gone: _containers.RepeatedScalarFieldContainer[str]
    sequences: _containers.RepeatedCompositeFieldContainer[WatchedSequence]
    sequence_ids_gone: _containers.RepeatedScalarFieldContainer[int]
    queue: WatchedQueue
    steps: _containers.RepeatedCompositeFieldContainer[WatchedSteps]
    passed: _containers.RepeatedCompositeFieldContainer[WatchedSequence]
    rows: _containers.RepeatedCompositeFieldContainer[WatchedRows]
    def __init__(self, is_snapshot: bool = ..., epoch: _Optional[int] = ..., seq: _Optional[int] = ..., committed_seq: _Optional[int] = ..., unix_ns: _Optional[int] = ..., configured: _Optional[_Union[_ledger_pb2.ConfiguredInput, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[WatchedWorker, _Mapping]]] = ..., worker_ids_gone: _Optional[_Iterable[str]] = ..., sequences: _Optional[_Iterable[_Union[WatchedSequence, _Mapping]]] = ..., sequence_ids_gone: _Optional[_Iterable[int]] = ..., queue: _Optional[_Union[WatchedQueue, _Mapping]] = ..., steps: _Optional[_Iterable[_Union[WatchedSteps, _Mapping]]] = ..., passed: _Optional[_Iterable[_Union[WatchedSequence, _Mapping]]] = ..., rows: _Optional[_Iterable[_Union[WatchedRows, _Mapping]]] = ...) -> None: ...

class WatchedRows(_message.Message):
    __slots__ = ("worker_id", "sequence_ids", "num_tokens", "num_scheduled_tokens", "num_computed_tokens", "table_rows", "num_skipped_blocks", "num_kept_blocks", "num_new_blocks", "block_ids")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SCHEDULED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TABLE_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_SKIPPED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_KEPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_NEW_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    num_scheduled_tokens: _containers.RepeatedScalarFieldContainer[int]
    num_computed_tokens: _containers.RepeatedScalarFieldContainer[int]
    table_rows: _containers.RepeatedScalarFieldContainer[int]
    num_skipped_blocks: _containers.RepeatedScalarFieldContainer[int]
    num_kept_blocks: _containers.RepeatedScalarFieldContainer[int]
    num_new_blocks: _containers.RepeatedScalarFieldContainer[int]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, worker_id: _Optional[str] = ..., sequence_ids: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., num_scheduled_tokens: _Optional[_Iterable[int]] = ..., num_computed_tokens: _Optional[_Iterable[int]] = ..., table_rows: _Optional[_Iterable[int]] = ..., num_skipped_blocks: _Optional[_Iterable[int]] = ..., num_kept_blocks: _Optional[_Iterable[int]] = ..., num_new_blocks: _Optional[_Iterable[int]] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class WatchedSteps(_message.Message):
    __slots__ = ("worker_id", "num_skipped", "steps", "is_diff")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_SKIPPED_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    IS_DIFF_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    num_skipped: int
    steps: _containers.RepeatedCompositeFieldContainer[WatchedStep]
    is_diff: bool
    def __init__(self, worker_id: _Optional[str] = ..., num_skipped: _Optional[int] = ..., steps: _Optional[_Iterable[_Union[WatchedStep, _Mapping]]] = ..., is_diff: bool = ...) -> None: ...

class WatchedStep(_message.Message):
    __slots__ = ("plan_id", "step", "answered_ns", "step_us", "leave_slots", "join_slots", "join_sequence_ids", "chunk_slots", "chunk_tokens", "tokenless_slots", "num_tokens", "finished_slots", "preempted_sequence_ids", "blocks_free", "waiting", "preempted_whys", "lease_steps", "budget_tokens", "num_cached_tokens", "blocks_allocated", "blocks_evicted", "blocks_shared", "blocks_freed", "expected_us", "is_graph", "blocks_swapped_out", "blocks_swapped_in")
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_NS_FIELD_NUMBER: _ClassVar[int]
    STEP_US_FIELD_NUMBER: _ClassVar[int]
    LEAVE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    JOIN_SLOTS_FIELD_NUMBER: _ClassVar[int]
    JOIN_SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_SLOTS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENLESS_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_WHYS_FIELD_NUMBER: _ClassVar[int]
    LEASE_STEPS_FIELD_NUMBER: _ClassVar[int]
    BUDGET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_ALLOCATED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_EVICTED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_SHARED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FREED_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_US_FIELD_NUMBER: _ClassVar[int]
    IS_GRAPH_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_SWAPPED_OUT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_SWAPPED_IN_FIELD_NUMBER: _ClassVar[int]
    plan_id: int
    step: int
    answered_ns: int
    step_us: int
    leave_slots: _containers.RepeatedScalarFieldContainer[int]
    join_slots: _containers.RepeatedScalarFieldContainer[int]
    join_sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    chunk_slots: _containers.RepeatedScalarFieldContainer[int]
    chunk_tokens: _containers.RepeatedScalarFieldContainer[int]
    tokenless_slots: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: int
    finished_slots: _containers.RepeatedScalarFieldContainer[int]
    preempted_sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    blocks_free: int
    waiting: int
    preempted_whys: _containers.RepeatedScalarFieldContainer[_common_pb2.WhyPassedOver]
    lease_steps: int
    budget_tokens: int
    num_cached_tokens: int
    blocks_allocated: int
    blocks_evicted: int
    blocks_shared: int
    blocks_freed: int
    expected_us: int
    is_graph: bool
    blocks_swapped_out: int
    blocks_swapped_in: int
    def __init__(self, plan_id: _Optional[int] = ..., step: _Optional[int] = ..., answered_ns: _Optional[int] = ..., step_us: _Optional[int] = ..., leave_slots: _Optional[_Iterable[int]] = ..., join_slots: _Optional[_Iterable[int]] = ..., join_sequence_ids: _Optional[_Iterable[int]] = ..., chunk_slots: _Optional[_Iterable[int]] = ..., chunk_tokens: _Optional[_Iterable[int]] = ..., tokenless_slots: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[int] = ..., finished_slots: _Optional[_Iterable[int]] = ..., preempted_sequence_ids: _Optional[_Iterable[int]] = ..., blocks_free: _Optional[int] = ..., waiting: _Optional[int] = ..., preempted_whys: _Optional[_Iterable[_Union[_common_pb2.WhyPassedOver, str]]] = ..., lease_steps: _Optional[int] = ..., budget_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., blocks_allocated: _Optional[int] = ..., blocks_evicted: _Optional[int] = ..., blocks_shared: _Optional[int] = ..., blocks_freed: _Optional[int] = ..., expected_us: _Optional[int] = ..., is_graph: bool = ..., blocks_swapped_out: _Optional[int] = ..., blocks_swapped_in: _Optional[int] = ...) -> None: ...

class WatchedQueue(_message.Message):
    __slots__ = ("sequence_ids", "length")
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    length: int
    def __init__(self, sequence_ids: _Optional[_Iterable[int]] = ..., length: _Optional[int] = ...) -> None: ...

class WatchedWorker(_message.Message):
    __slots__ = ("worker_id", "address", "slots_max", "block_size", "block_count", "blocks_free", "layer_groups", "is_draining", "is_late", "plans", "passed_over", "cached_blocks", "step_tokens_max", "mixed_tokens_max", "host_block_count", "host_blocks_used")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_MAX_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    LAYER_GROUPS_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    IS_LATE_FIELD_NUMBER: _ClassVar[int]
    PLANS_FIELD_NUMBER: _ClassVar[int]
    PASSED_OVER_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_MAX_FIELD_NUMBER: _ClassVar[int]
    MIXED_TOKENS_MAX_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    slots_max: int
    block_size: int
    block_count: int
    blocks_free: int
    layer_groups: _containers.RepeatedCompositeFieldContainer[_common_pb2.LayerGroup]
    is_draining: bool
    is_late: bool
    plans: _containers.RepeatedCompositeFieldContainer[InFlightPlan]
    passed_over: _containers.RepeatedCompositeFieldContainer[PassedOver]
    cached_blocks: bytes
    step_tokens_max: int
    mixed_tokens_max: int
    host_block_count: int
    host_blocks_used: int
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ..., slots_max: _Optional[int] = ..., block_size: _Optional[int] = ..., block_count: _Optional[int] = ..., blocks_free: _Optional[int] = ..., layer_groups: _Optional[_Iterable[_Union[_common_pb2.LayerGroup, _Mapping]]] = ..., is_draining: bool = ..., is_late: bool = ..., plans: _Optional[_Iterable[_Union[InFlightPlan, _Mapping]]] = ..., passed_over: _Optional[_Iterable[_Union[PassedOver, _Mapping]]] = ..., cached_blocks: _Optional[bytes] = ..., step_tokens_max: _Optional[int] = ..., mixed_tokens_max: _Optional[int] = ..., host_block_count: _Optional[int] = ..., host_blocks_used: _Optional[int] = ...) -> None: ...

class InFlightPlan(_message.Message):
    __slots__ = ("plan_id", "lease_steps", "steps_answered")
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_STEPS_FIELD_NUMBER: _ClassVar[int]
    STEPS_ANSWERED_FIELD_NUMBER: _ClassVar[int]
    plan_id: int
    lease_steps: int
    steps_answered: int
    def __init__(self, plan_id: _Optional[int] = ..., lease_steps: _Optional[int] = ..., steps_answered: _Optional[int] = ...) -> None: ...

class WatchedSequence(_message.Message):
    __slots__ = ("sequence_id", "identity", "place", "counts", "tables", "passed_over")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    PASSED_OVER_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    identity: SequenceIdentity
    place: SequencePlace
    counts: SequenceCounts
    tables: SequenceTables
    passed_over: SequencePassedOver
    def __init__(self, sequence_id: _Optional[int] = ..., identity: _Optional[_Union[SequenceIdentity, _Mapping]] = ..., place: _Optional[_Union[SequencePlace, _Mapping]] = ..., counts: _Optional[_Union[SequenceCounts, _Mapping]] = ..., tables: _Optional[_Union[SequenceTables, _Mapping]] = ..., passed_over: _Optional[_Union[SequencePassedOver, _Mapping]] = ...) -> None: ...

class SequenceIdentity(_message.Message):
    __slots__ = ("id", "choice", "priority", "arrived_ns", "num_prompt_tokens", "tokens_max")
    ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_NS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_MAX_FIELD_NUMBER: _ClassVar[int]
    id: str
    choice: int
    priority: int
    arrived_ns: int
    num_prompt_tokens: int
    tokens_max: int
    def __init__(self, id: _Optional[str] = ..., choice: _Optional[int] = ..., priority: _Optional[int] = ..., arrived_ns: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., tokens_max: _Optional[int] = ...) -> None: ...

class SequencePlace(_message.Message):
    __slots__ = ("state", "worker_id", "slot", "num_preemptions")
    STATE_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    state: SequenceState
    worker_id: str
    slot: int
    num_preemptions: int
    def __init__(self, state: _Optional[_Union[SequenceState, str]] = ..., worker_id: _Optional[str] = ..., slot: _Optional[int] = ..., num_preemptions: _Optional[int] = ...) -> None: ...

class SequenceCounts(_message.Message):
    __slots__ = ("num_tokens", "num_scheduled_tokens", "num_computed_tokens")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SCHEDULED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    num_scheduled_tokens: int
    num_computed_tokens: int
    def __init__(self, num_tokens: _Optional[int] = ..., num_scheduled_tokens: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ...) -> None: ...

class SequenceTables(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[WatchedTable]
    def __init__(self, groups: _Optional[_Iterable[_Union[WatchedTable, _Mapping]]] = ...) -> None: ...

class WatchedTable(_message.Message):
    __slots__ = ("num_skipped_blocks", "num_kept_blocks", "block_ids")
    NUM_SKIPPED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_KEPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    num_skipped_blocks: int
    num_kept_blocks: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, num_skipped_blocks: _Optional[int] = ..., num_kept_blocks: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SequencePassedOver(_message.Message):
    __slots__ = ("by",)
    BY_FIELD_NUMBER: _ClassVar[int]
    by: _containers.RepeatedCompositeFieldContainer[PassedOver]
    def __init__(self, by: _Optional[_Iterable[_Union[PassedOver, _Mapping]]] = ...) -> None: ...

class PassedOver(_message.Message):
    __slots__ = ("worker_id", "stage", "why")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    stage: str
    why: _common_pb2.WhyPassedOver
    def __init__(self, worker_id: _Optional[str] = ..., stage: _Optional[str] = ..., why: _Optional[_Union[_common_pb2.WhyPassedOver, str]] = ...) -> None: ...
