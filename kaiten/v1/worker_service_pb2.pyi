from kaiten.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ProfileRequest(_message.Message):
    __slots__ = ("steps",)
    STEPS_FIELD_NUMBER: _ClassVar[int]
    steps: int
    def __init__(self, steps: _Optional[int] = ...) -> None: ...

class ProfileResponse(_message.Message):
    __slots__ = ("piece",)
    PIECE_FIELD_NUMBER: _ClassVar[int]
    piece: bytes
    def __init__(self, piece: _Optional[bytes] = ...) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: _common_pb2.WorkerDescription
    def __init__(self, worker: _Optional[_Union[_common_pb2.WorkerDescription, _Mapping]] = ...) -> None: ...

class ExecuteRequest(_message.Message):
    __slots__ = ("open", "plan")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    open: Open
    plan: Plan
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("leader", "boot_id", "cell")
    LEADER_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    CELL_FIELD_NUMBER: _ClassVar[int]
    leader: _common_pb2.Leader
    boot_id: str
    cell: str
    def __init__(self, leader: _Optional[_Union[_common_pb2.Leader, _Mapping]] = ..., boot_id: _Optional[str] = ..., cell: _Optional[str] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("leader", "plan_id", "lease_steps", "leaves", "joins", "append_slots", "append_blocks", "append_groups", "replace_slots", "replace_indices", "replace_blocks", "replace_groups", "copy_sources", "copy_targets", "chunk_slots", "chunk_tokens", "membership_checksum", "traceparent", "slot_tokens_least", "slot_tokens_most", "expected_step_us", "swap_sources", "swap_targets")
    LEADER_FIELD_NUMBER: _ClassVar[int]
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_STEPS_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    JOINS_FIELD_NUMBER: _ClassVar[int]
    APPEND_SLOTS_FIELD_NUMBER: _ClassVar[int]
    APPEND_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    APPEND_GROUPS_FIELD_NUMBER: _ClassVar[int]
    REPLACE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    REPLACE_INDICES_FIELD_NUMBER: _ClassVar[int]
    REPLACE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REPLACE_GROUPS_FIELD_NUMBER: _ClassVar[int]
    COPY_SOURCES_FIELD_NUMBER: _ClassVar[int]
    COPY_TARGETS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_SLOTS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    SLOT_TOKENS_LEAST_FIELD_NUMBER: _ClassVar[int]
    SLOT_TOKENS_MOST_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_STEP_US_FIELD_NUMBER: _ClassVar[int]
    SWAP_SOURCES_FIELD_NUMBER: _ClassVar[int]
    SWAP_TARGETS_FIELD_NUMBER: _ClassVar[int]
    leader: _common_pb2.Leader
    plan_id: int
    lease_steps: int
    leaves: _containers.RepeatedScalarFieldContainer[int]
    joins: _containers.RepeatedCompositeFieldContainer[Join]
    append_slots: _containers.RepeatedScalarFieldContainer[int]
    append_blocks: _containers.RepeatedScalarFieldContainer[int]
    append_groups: _containers.RepeatedScalarFieldContainer[int]
    replace_slots: _containers.RepeatedScalarFieldContainer[int]
    replace_indices: _containers.RepeatedScalarFieldContainer[int]
    replace_blocks: _containers.RepeatedScalarFieldContainer[int]
    replace_groups: _containers.RepeatedScalarFieldContainer[int]
    copy_sources: _containers.RepeatedScalarFieldContainer[int]
    copy_targets: _containers.RepeatedScalarFieldContainer[int]
    chunk_slots: _containers.RepeatedScalarFieldContainer[int]
    chunk_tokens: _containers.RepeatedScalarFieldContainer[int]
    membership_checksum: int
    traceparent: str
    slot_tokens_least: int
    slot_tokens_most: int
    expected_step_us: int
    swap_sources: _containers.RepeatedScalarFieldContainer[int]
    swap_targets: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, leader: _Optional[_Union[_common_pb2.Leader, _Mapping]] = ..., plan_id: _Optional[int] = ..., lease_steps: _Optional[int] = ..., leaves: _Optional[_Iterable[int]] = ..., joins: _Optional[_Iterable[_Union[Join, _Mapping]]] = ..., append_slots: _Optional[_Iterable[int]] = ..., append_blocks: _Optional[_Iterable[int]] = ..., append_groups: _Optional[_Iterable[int]] = ..., replace_slots: _Optional[_Iterable[int]] = ..., replace_indices: _Optional[_Iterable[int]] = ..., replace_blocks: _Optional[_Iterable[int]] = ..., replace_groups: _Optional[_Iterable[int]] = ..., copy_sources: _Optional[_Iterable[int]] = ..., copy_targets: _Optional[_Iterable[int]] = ..., chunk_slots: _Optional[_Iterable[int]] = ..., chunk_tokens: _Optional[_Iterable[int]] = ..., membership_checksum: _Optional[int] = ..., traceparent: _Optional[str] = ..., slot_tokens_least: _Optional[int] = ..., slot_tokens_most: _Optional[int] = ..., expected_step_us: _Optional[int] = ..., swap_sources: _Optional[_Iterable[int]] = ..., swap_targets: _Optional[_Iterable[int]] = ...) -> None: ...

class Join(_message.Message):
    __slots__ = ("slot", "sequence_id", "token_ids", "prompt_tokens", "num_computed_tokens", "block_tables", "sampling", "prompt_logprobs_from")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TABLES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FROM_FIELD_NUMBER: _ClassVar[int]
    slot: int
    sequence_id: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_tokens: int
    num_computed_tokens: int
    block_tables: _containers.RepeatedCompositeFieldContainer[BlockTable]
    sampling: RowSampling
    prompt_logprobs_from: int
    def __init__(self, slot: _Optional[int] = ..., sequence_id: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., prompt_tokens: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., block_tables: _Optional[_Iterable[_Union[BlockTable, _Mapping]]] = ..., sampling: _Optional[_Union[RowSampling, _Mapping]] = ..., prompt_logprobs_from: _Optional[int] = ...) -> None: ...

class BlockTable(_message.Message):
    __slots__ = ("num_skipped_blocks", "blocks")
    NUM_SKIPPED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_skipped_blocks: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, num_skipped_blocks: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class RowSampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "choice", "max_tokens", "min_tokens", "stop_token_ids", "logprobs", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "bad_words", "prompt_logprobs", "grammar")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    choice: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenBias]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenSequence]
    prompt_logprobs: int
    grammar: str
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., choice: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[_common_pb2.TokenBias, _Mapping]]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[_Union[_common_pb2.TokenSequence, _Mapping]]] = ..., prompt_logprobs: _Optional[int] = ..., grammar: _Optional[str] = ...) -> None: ...

class ExecuteResponse(_message.Message):
    __slots__ = ("opened", "results")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    opened: Opened
    results: StepResults
    def __init__(self, opened: _Optional[_Union[Opened, _Mapping]] = ..., results: _Optional[_Union[StepResults, _Mapping]] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: _common_pb2.WorkerDescription
    def __init__(self, worker: _Optional[_Union[_common_pb2.WorkerDescription, _Mapping]] = ...) -> None: ...

class StepResults(_message.Message):
    __slots__ = ("steps",)
    STEPS_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[StepResult]
    def __init__(self, steps: _Optional[_Iterable[_Union[StepResult, _Mapping]]] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("boot_id", "plan_id", "step", "slots", "token_ids", "token_counts", "logprobs", "finished", "errors", "is_last", "timings", "prompt_logprobs")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    plan_id: int
    step: int
    slots: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    token_counts: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[RowLogprobs]
    finished: _containers.RepeatedCompositeFieldContainer[RowFinished]
    errors: _containers.RepeatedCompositeFieldContainer[RowError]
    is_last: bool
    timings: StepTimings
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[RowPromptLogprobs]
    def __init__(self, boot_id: _Optional[str] = ..., plan_id: _Optional[int] = ..., step: _Optional[int] = ..., slots: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., token_counts: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[RowLogprobs, _Mapping]]] = ..., finished: _Optional[_Iterable[_Union[RowFinished, _Mapping]]] = ..., errors: _Optional[_Iterable[_Union[RowError, _Mapping]]] = ..., is_last: bool = ..., timings: _Optional[_Union[StepTimings, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[RowPromptLogprobs, _Mapping]]] = ...) -> None: ...

class RowPromptLogprobs(_message.Message):
    __slots__ = ("slot", "logprobs")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    logprobs: _common_pb2.PromptLogprobs
    def __init__(self, slot: _Optional[int] = ..., logprobs: _Optional[_Union[_common_pb2.PromptLogprobs, _Mapping]] = ...) -> None: ...

class RowLogprobs(_message.Message):
    __slots__ = ("slot", "logprobs")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    logprobs: _common_pb2.TokenLogprobs
    def __init__(self, slot: _Optional[int] = ..., logprobs: _Optional[_Union[_common_pb2.TokenLogprobs, _Mapping]] = ...) -> None: ...

class RowFinished(_message.Message):
    __slots__ = ("slot", "reason")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    slot: int
    reason: _common_pb2.FinishReason
    def __init__(self, slot: _Optional[int] = ..., reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ...) -> None: ...

class RowError(_message.Message):
    __slots__ = ("slot", "message", "is_unsatisfiable")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    IS_UNSATISFIABLE_FIELD_NUMBER: _ClassVar[int]
    slot: int
    message: str
    is_unsatisfiable: bool
    def __init__(self, slot: _Optional[int] = ..., message: _Optional[str] = ..., is_unsatisfiable: bool = ...) -> None: ...

class StepTimings(_message.Message):
    __slots__ = ("wait_us", "forward_us", "sample_us", "tokens_computed", "rows", "is_graph")
    WAIT_US_FIELD_NUMBER: _ClassVar[int]
    FORWARD_US_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_US_FIELD_NUMBER: _ClassVar[int]
    TOKENS_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    IS_GRAPH_FIELD_NUMBER: _ClassVar[int]
    wait_us: int
    forward_us: int
    sample_us: int
    tokens_computed: int
    rows: int
    is_graph: bool
    def __init__(self, wait_us: _Optional[int] = ..., forward_us: _Optional[int] = ..., sample_us: _Optional[int] = ..., tokens_computed: _Optional[int] = ..., rows: _Optional[int] = ..., is_graph: bool = ...) -> None: ...
