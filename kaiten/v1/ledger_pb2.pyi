from kaiten.v1 import common_pb2 as _common_pb2
from kaiten.v1 import inference_service_pb2 as _inference_service_pb2
from kaiten.v1 import worker_service_pb2 as _worker_service_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class InboxRecord(_message.Message):
    __slots__ = ("submit", "cancel")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    submit: SubmitRecord
    cancel: CancelRecord
    def __init__(self, submit: _Optional[_Union[SubmitRecord, _Mapping]] = ..., cancel: _Optional[_Union[CancelRecord, _Mapping]] = ...) -> None: ...

class SubmitRecord(_message.Message):
    __slots__ = ("id", "tenant", "n", "prompt_token_ids", "sampling", "timeout_ms", "priority", "traceparent", "render", "tenant_tokens_max", "worker_wait_ms")
    ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    RENDER_FIELD_NUMBER: _ClassVar[int]
    TENANT_TOKENS_MAX_FIELD_NUMBER: _ClassVar[int]
    WORKER_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    id: str
    tenant: str
    n: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _worker_service_pb2.RowSampling
    timeout_ms: int
    priority: int
    traceparent: str
    render: RenderOptions
    tenant_tokens_max: int
    worker_wait_ms: int
    def __init__(self, id: _Optional[str] = ..., tenant: _Optional[str] = ..., n: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_worker_service_pb2.RowSampling, _Mapping]] = ..., timeout_ms: _Optional[int] = ..., priority: _Optional[int] = ..., traceparent: _Optional[str] = ..., render: _Optional[_Union[RenderOptions, _Mapping]] = ..., tenant_tokens_max: _Optional[int] = ..., worker_wait_ms: _Optional[int] = ...) -> None: ...

class RenderOptions(_message.Message):
    __slots__ = ("stop", "include_stop", "show_special_tokens", "prompt_token_ids", "hide_output", "keep_leading_space", "shown_token_ids", "begins_in_reasoning", "parsing")
    STOP_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_FIELD_NUMBER: _ClassVar[int]
    SHOW_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    HIDE_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    KEEP_LEADING_SPACE_FIELD_NUMBER: _ClassVar[int]
    SHOWN_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BEGINS_IN_REASONING_FIELD_NUMBER: _ClassVar[int]
    PARSING_FIELD_NUMBER: _ClassVar[int]
    stop: _containers.RepeatedScalarFieldContainer[str]
    include_stop: bool
    show_special_tokens: bool
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    hide_output: bool
    keep_leading_space: bool
    shown_token_ids: _containers.RepeatedScalarFieldContainer[int]
    begins_in_reasoning: bool
    parsing: OutputParsing
    def __init__(self, stop: _Optional[_Iterable[str]] = ..., include_stop: bool = ..., show_special_tokens: bool = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., hide_output: bool = ..., keep_leading_space: bool = ..., shown_token_ids: _Optional[_Iterable[int]] = ..., begins_in_reasoning: bool = ..., parsing: _Optional[_Union[OutputParsing, _Mapping]] = ...) -> None: ...

class OutputParsing(_message.Message):
    __slots__ = ("tool_names", "is_single_call", "must_call")
    TOOL_NAMES_FIELD_NUMBER: _ClassVar[int]
    IS_SINGLE_CALL_FIELD_NUMBER: _ClassVar[int]
    MUST_CALL_FIELD_NUMBER: _ClassVar[int]
    tool_names: _containers.RepeatedScalarFieldContainer[str]
    is_single_call: bool
    must_call: bool
    def __init__(self, tool_names: _Optional[_Iterable[str]] = ..., is_single_call: bool = ..., must_call: bool = ...) -> None: ...

class CancelRecord(_message.Message):
    __slots__ = ("id", "sequence_id", "n", "choice", "reason", "output_tokens", "error")
    ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    id: str
    sequence_id: int
    n: int
    choice: int
    reason: _common_pb2.FinishReason
    output_tokens: int
    error: str
    def __init__(self, id: _Optional[str] = ..., sequence_id: _Optional[int] = ..., n: _Optional[int] = ..., choice: _Optional[int] = ..., reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., output_tokens: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class JournalRecord(_message.Message):
    __slots__ = ("seq", "epoch", "unix_ns", "sequence_ids", "positions", "token_ids", "logprobs", "finished", "step", "inputs", "after_seq")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQ_FIELD_NUMBER: _ClassVar[int]
    seq: int
    epoch: int
    unix_ns: int
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    positions: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[SequenceLogprobs]
    finished: _containers.RepeatedCompositeFieldContainer[SequenceFinished]
    step: StepRecord
    inputs: _containers.RepeatedCompositeFieldContainer[CoreInput]
    after_seq: int
    def __init__(self, seq: _Optional[int] = ..., epoch: _Optional[int] = ..., unix_ns: _Optional[int] = ..., sequence_ids: _Optional[_Iterable[int]] = ..., positions: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[SequenceLogprobs, _Mapping]]] = ..., finished: _Optional[_Iterable[_Union[SequenceFinished, _Mapping]]] = ..., step: _Optional[_Union[StepRecord, _Mapping]] = ..., inputs: _Optional[_Iterable[_Union[CoreInput, _Mapping]]] = ..., after_seq: _Optional[int] = ...) -> None: ...

class SequenceLogprobs(_message.Message):
    __slots__ = ("sequence_id", "logprobs")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    logprobs: _common_pb2.TokenLogprobs
    def __init__(self, sequence_id: _Optional[int] = ..., logprobs: _Optional[_Union[_common_pb2.TokenLogprobs, _Mapping]] = ...) -> None: ...

class SequenceFinished(_message.Message):
    __slots__ = ("sequence_id", "reason", "output_tokens", "error", "done", "is_retryable", "is_unsatisfiable")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    IS_RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    IS_UNSATISFIABLE_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    reason: _common_pb2.FinishReason
    output_tokens: int
    error: str
    done: _inference_service_pb2.Done
    is_retryable: bool
    is_unsatisfiable: bool
    def __init__(self, sequence_id: _Optional[int] = ..., reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., output_tokens: _Optional[int] = ..., error: _Optional[str] = ..., done: _Optional[_Union[_inference_service_pb2.Done, _Mapping]] = ..., is_retryable: bool = ..., is_unsatisfiable: bool = ...) -> None: ...

class StepRecord(_message.Message):
    __slots__ = ("worker_id", "plan_id", "step", "timings")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    plan_id: int
    step: int
    timings: _worker_service_pb2.StepTimings
    def __init__(self, worker_id: _Optional[str] = ..., plan_id: _Optional[int] = ..., step: _Optional[int] = ..., timings: _Optional[_Union[_worker_service_pb2.StepTimings, _Mapping]] = ...) -> None: ...

class CoreInput(_message.Message):
    __slots__ = ("now_ns", "submit", "cancel", "worker_joined", "worker_lost", "plan", "result", "expire", "worker_draining", "configured", "worker_late", "worker_changed", "handed_over", "store_behind", "throttled")
    NOW_NS_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    WORKER_JOINED_FIELD_NUMBER: _ClassVar[int]
    WORKER_LOST_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_FIELD_NUMBER: _ClassVar[int]
    WORKER_DRAINING_FIELD_NUMBER: _ClassVar[int]
    CONFIGURED_FIELD_NUMBER: _ClassVar[int]
    WORKER_LATE_FIELD_NUMBER: _ClassVar[int]
    WORKER_CHANGED_FIELD_NUMBER: _ClassVar[int]
    HANDED_OVER_FIELD_NUMBER: _ClassVar[int]
    STORE_BEHIND_FIELD_NUMBER: _ClassVar[int]
    THROTTLED_FIELD_NUMBER: _ClassVar[int]
    now_ns: int
    submit: SubmitInput
    cancel: CancelRecord
    worker_joined: WorkerJoinedInput
    worker_lost: WorkerLostInput
    plan: PlanInput
    result: ResultInput
    expire: ExpireInput
    worker_draining: WorkerDrainingInput
    configured: ConfiguredInput
    worker_late: WorkerLateInput
    worker_changed: WorkerChangedInput
    handed_over: CellHandover
    store_behind: StoreBehindInput
    throttled: ThrottledChange
    def __init__(self, now_ns: _Optional[int] = ..., submit: _Optional[_Union[SubmitInput, _Mapping]] = ..., cancel: _Optional[_Union[CancelRecord, _Mapping]] = ..., worker_joined: _Optional[_Union[WorkerJoinedInput, _Mapping]] = ..., worker_lost: _Optional[_Union[WorkerLostInput, _Mapping]] = ..., plan: _Optional[_Union[PlanInput, _Mapping]] = ..., result: _Optional[_Union[ResultInput, _Mapping]] = ..., expire: _Optional[_Union[ExpireInput, _Mapping]] = ..., worker_draining: _Optional[_Union[WorkerDrainingInput, _Mapping]] = ..., configured: _Optional[_Union[ConfiguredInput, _Mapping]] = ..., worker_late: _Optional[_Union[WorkerLateInput, _Mapping]] = ..., worker_changed: _Optional[_Union[WorkerChangedInput, _Mapping]] = ..., handed_over: _Optional[_Union[CellHandover, _Mapping]] = ..., store_behind: _Optional[_Union[StoreBehindInput, _Mapping]] = ..., throttled: _Optional[_Union[ThrottledChange, _Mapping]] = ...) -> None: ...

class ThrottledChange(_message.Message):
    __slots__ = ("begun", "over")
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    begun: _containers.RepeatedScalarFieldContainer[str]
    over: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, begun: _Optional[_Iterable[str]] = ..., over: _Optional[_Iterable[str]] = ...) -> None: ...

class ConfiguredInput(_message.Message):
    __slots__ = ("policy", "lease_steps_max", "plans_in_flight_max", "prefill_tokens_min", "preemptions_max", "deaths_max", "misfit_wait_ns", "tenant_tokens_max", "placement", "order", "victim", "admission", "mix", "cadence", "priority_worth_ns", "token_worth_ns", "wait_ns_max", "long_prefill_tokens", "long_prefills_max", "schedule_interval_steps", "waiting_served_permille", "waiting_steps_max", "tenant_weights", "itl_target_us", "batch_gap_us")
    class TenantWeightsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    POLICY_FIELD_NUMBER: _ClassVar[int]
    LEASE_STEPS_MAX_FIELD_NUMBER: _ClassVar[int]
    PLANS_IN_FLIGHT_MAX_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_MIN_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_MAX_FIELD_NUMBER: _ClassVar[int]
    DEATHS_MAX_FIELD_NUMBER: _ClassVar[int]
    MISFIT_WAIT_NS_FIELD_NUMBER: _ClassVar[int]
    TENANT_TOKENS_MAX_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    VICTIM_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    MIX_FIELD_NUMBER: _ClassVar[int]
    CADENCE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_WORTH_NS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_WORTH_NS_FIELD_NUMBER: _ClassVar[int]
    WAIT_NS_MAX_FIELD_NUMBER: _ClassVar[int]
    LONG_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LONG_PREFILLS_MAX_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_INTERVAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    WAITING_SERVED_PERMILLE_FIELD_NUMBER: _ClassVar[int]
    WAITING_STEPS_MAX_FIELD_NUMBER: _ClassVar[int]
    TENANT_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    ITL_TARGET_US_FIELD_NUMBER: _ClassVar[int]
    BATCH_GAP_US_FIELD_NUMBER: _ClassVar[int]
    policy: str
    lease_steps_max: int
    plans_in_flight_max: int
    prefill_tokens_min: int
    preemptions_max: int
    deaths_max: int
    misfit_wait_ns: int
    tenant_tokens_max: int
    placement: str
    order: str
    victim: str
    admission: str
    mix: str
    cadence: str
    priority_worth_ns: int
    token_worth_ns: int
    wait_ns_max: int
    long_prefill_tokens: int
    long_prefills_max: int
    schedule_interval_steps: int
    waiting_served_permille: int
    waiting_steps_max: int
    tenant_weights: _containers.ScalarMap[str, int]
    itl_target_us: int
    batch_gap_us: int
    def __init__(self, policy: _Optional[str] = ..., lease_steps_max: _Optional[int] = ..., plans_in_flight_max: _Optional[int] = ..., prefill_tokens_min: _Optional[int] = ..., preemptions_max: _Optional[int] = ..., deaths_max: _Optional[int] = ..., misfit_wait_ns: _Optional[int] = ..., tenant_tokens_max: _Optional[int] = ..., placement: _Optional[str] = ..., order: _Optional[str] = ..., victim: _Optional[str] = ..., admission: _Optional[str] = ..., mix: _Optional[str] = ..., cadence: _Optional[str] = ..., priority_worth_ns: _Optional[int] = ..., token_worth_ns: _Optional[int] = ..., wait_ns_max: _Optional[int] = ..., long_prefill_tokens: _Optional[int] = ..., long_prefills_max: _Optional[int] = ..., schedule_interval_steps: _Optional[int] = ..., waiting_served_permille: _Optional[int] = ..., waiting_steps_max: _Optional[int] = ..., tenant_weights: _Optional[_Mapping[str, int]] = ..., itl_target_us: _Optional[int] = ..., batch_gap_us: _Optional[int] = ...) -> None: ...

class SubmitInput(_message.Message):
    __slots__ = ("id", "sequence_id", "committed_tokens", "prompt_logprobs_from", "arrived_ns")
    ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FROM_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_NS_FIELD_NUMBER: _ClassVar[int]
    id: str
    sequence_id: int
    committed_tokens: _containers.RepeatedScalarFieldContainer[int]
    prompt_logprobs_from: int
    arrived_ns: int
    def __init__(self, id: _Optional[str] = ..., sequence_id: _Optional[int] = ..., committed_tokens: _Optional[_Iterable[int]] = ..., prompt_logprobs_from: _Optional[int] = ..., arrived_ns: _Optional[int] = ...) -> None: ...

class WorkerJoinedInput(_message.Message):
    __slots__ = ("worker_id", "worker")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    worker: _common_pb2.WorkerDescription
    def __init__(self, worker_id: _Optional[str] = ..., worker: _Optional[_Union[_common_pb2.WorkerDescription, _Mapping]] = ...) -> None: ...

class WorkerLostInput(_message.Message):
    __slots__ = ("worker_id", "is_crash", "reason")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    IS_CRASH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    is_crash: bool
    reason: str
    def __init__(self, worker_id: _Optional[str] = ..., is_crash: bool = ..., reason: _Optional[str] = ...) -> None: ...

class WorkerDrainingInput(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class WorkerLateInput(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class WorkerChangedInput(_message.Message):
    __slots__ = ("worker_id", "worker")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    worker: _common_pb2.WorkerDescription
    def __init__(self, worker_id: _Optional[str] = ..., worker: _Optional[_Union[_common_pb2.WorkerDescription, _Mapping]] = ...) -> None: ...

class PlanInput(_message.Message):
    __slots__ = ("worker_id", "plan_id", "lease_steps", "leave_slots", "admitted", "join_slots", "preempted", "chunk_tokens", "decode_rows", "blocks_free", "waiting", "digest", "join_computed_tokens", "join_skipped_blocks", "join_blocks", "chunk_slots", "chunk_slot_tokens", "preempted_whys", "passed_over", "passed_over_whys", "join_tokens", "join_swapped_in_blocks")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_STEPS_FIELD_NUMBER: _ClassVar[int]
    LEAVE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    JOIN_SLOTS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_ROWS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    JOIN_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    JOIN_SKIPPED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    JOIN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_SLOTS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_SLOT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_WHYS_FIELD_NUMBER: _ClassVar[int]
    PASSED_OVER_FIELD_NUMBER: _ClassVar[int]
    PASSED_OVER_WHYS_FIELD_NUMBER: _ClassVar[int]
    JOIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    JOIN_SWAPPED_IN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    plan_id: int
    lease_steps: int
    leave_slots: _containers.RepeatedScalarFieldContainer[int]
    admitted: _containers.RepeatedScalarFieldContainer[int]
    join_slots: _containers.RepeatedScalarFieldContainer[int]
    preempted: _containers.RepeatedScalarFieldContainer[int]
    chunk_tokens: int
    decode_rows: int
    blocks_free: int
    waiting: int
    digest: int
    join_computed_tokens: _containers.RepeatedScalarFieldContainer[int]
    join_skipped_blocks: _containers.RepeatedScalarFieldContainer[int]
    join_blocks: _containers.RepeatedScalarFieldContainer[int]
    chunk_slots: _containers.RepeatedScalarFieldContainer[int]
    chunk_slot_tokens: _containers.RepeatedScalarFieldContainer[int]
    preempted_whys: _containers.RepeatedScalarFieldContainer[_common_pb2.WhyPassedOver]
    passed_over: _containers.RepeatedScalarFieldContainer[int]
    passed_over_whys: _containers.RepeatedScalarFieldContainer[_common_pb2.WhyPassedOver]
    join_tokens: _containers.RepeatedScalarFieldContainer[int]
    join_swapped_in_blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, worker_id: _Optional[str] = ..., plan_id: _Optional[int] = ..., lease_steps: _Optional[int] = ..., leave_slots: _Optional[_Iterable[int]] = ..., admitted: _Optional[_Iterable[int]] = ..., join_slots: _Optional[_Iterable[int]] = ..., preempted: _Optional[_Iterable[int]] = ..., chunk_tokens: _Optional[int] = ..., decode_rows: _Optional[int] = ..., blocks_free: _Optional[int] = ..., waiting: _Optional[int] = ..., digest: _Optional[int] = ..., join_computed_tokens: _Optional[_Iterable[int]] = ..., join_skipped_blocks: _Optional[_Iterable[int]] = ..., join_blocks: _Optional[_Iterable[int]] = ..., chunk_slots: _Optional[_Iterable[int]] = ..., chunk_slot_tokens: _Optional[_Iterable[int]] = ..., preempted_whys: _Optional[_Iterable[_Union[_common_pb2.WhyPassedOver, str]]] = ..., passed_over: _Optional[_Iterable[int]] = ..., passed_over_whys: _Optional[_Iterable[_Union[_common_pb2.WhyPassedOver, str]]] = ..., join_tokens: _Optional[_Iterable[int]] = ..., join_swapped_in_blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class ResultInput(_message.Message):
    __slots__ = ("step", "worker_id")
    STEP_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    step: _worker_service_pb2.StepResult
    worker_id: str
    def __init__(self, step: _Optional[_Union[_worker_service_pb2.StepResult, _Mapping]] = ..., worker_id: _Optional[str] = ...) -> None: ...

class ExpireInput(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StoreBehindInput(_message.Message):
    __slots__ = ("is_behind",)
    IS_BEHIND_FIELD_NUMBER: _ClassVar[int]
    is_behind: bool
    def __init__(self, is_behind: bool = ...) -> None: ...

class FoldedTokens(_message.Message):
    __slots__ = ("token_ids", "logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class StoredPromptLogprobs(_message.Message):
    __slots__ = ("runs",)
    RUNS_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[_common_pb2.PromptLogprobs]
    def __init__(self, runs: _Optional[_Iterable[_Union[_common_pb2.PromptLogprobs, _Mapping]]] = ...) -> None: ...

class RequestResult(_message.Message):
    __slots__ = ("id", "sequence_id", "prompt_tokens", "choices", "done", "render")
    ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    RENDER_FIELD_NUMBER: _ClassVar[int]
    id: str
    sequence_id: int
    prompt_tokens: int
    choices: _containers.RepeatedCompositeFieldContainer[ChoiceResult]
    done: _inference_service_pb2.Done
    render: RenderOptions
    def __init__(self, id: _Optional[str] = ..., sequence_id: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., choices: _Optional[_Iterable[_Union[ChoiceResult, _Mapping]]] = ..., done: _Optional[_Union[_inference_service_pb2.Done, _Mapping]] = ..., render: _Optional[_Union[RenderOptions, _Mapping]] = ...) -> None: ...

class ChoiceResult(_message.Message):
    __slots__ = ("output", "finished")
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    output: FoldedTokens
    finished: SequenceFinished
    def __init__(self, output: _Optional[_Union[FoldedTokens, _Mapping]] = ..., finished: _Optional[_Union[SequenceFinished, _Mapping]] = ...) -> None: ...

class CellRecord(_message.Message):
    __slots__ = ("model", "workers_ready", "waiting", "running", "stalled_ms", "waiting_sequence_ids", "full_tenants", "weights_digest", "worker_addresses", "handover", "standby_addresses", "workers_expected", "problem", "queue_time_forecast_s", "kv_cache_usage", "clock_step")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WORKERS_READY_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    STALLED_MS_FIELD_NUMBER: _ClassVar[int]
    WAITING_SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    FULL_TENANTS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    WORKER_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    HANDOVER_FIELD_NUMBER: _ClassVar[int]
    STANDBY_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    WORKERS_EXPECTED_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIME_FORECAST_S_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_USAGE_FIELD_NUMBER: _ClassVar[int]
    CLOCK_STEP_FIELD_NUMBER: _ClassVar[int]
    model: _common_pb2.WorkerDescription
    workers_ready: int
    waiting: int
    running: int
    stalled_ms: int
    waiting_sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    full_tenants: _containers.RepeatedCompositeFieldContainer[FullTenant]
    weights_digest: str
    worker_addresses: _containers.RepeatedScalarFieldContainer[str]
    handover: CellHandover
    standby_addresses: _containers.RepeatedScalarFieldContainer[str]
    workers_expected: int
    problem: str
    queue_time_forecast_s: float
    kv_cache_usage: float
    clock_step: ClockStep
    def __init__(self, model: _Optional[_Union[_common_pb2.WorkerDescription, _Mapping]] = ..., workers_ready: _Optional[int] = ..., waiting: _Optional[int] = ..., running: _Optional[int] = ..., stalled_ms: _Optional[int] = ..., waiting_sequence_ids: _Optional[_Iterable[int]] = ..., full_tenants: _Optional[_Iterable[_Union[FullTenant, _Mapping]]] = ..., weights_digest: _Optional[str] = ..., worker_addresses: _Optional[_Iterable[str]] = ..., handover: _Optional[_Union[CellHandover, _Mapping]] = ..., standby_addresses: _Optional[_Iterable[str]] = ..., workers_expected: _Optional[int] = ..., problem: _Optional[str] = ..., queue_time_forecast_s: _Optional[float] = ..., kv_cache_usage: _Optional[float] = ..., clock_step: _Optional[_Union[ClockStep, _Mapping]] = ...) -> None: ...

class ClockStep(_message.Message):
    __slots__ = ("until_unix_ns", "by_ns")
    UNTIL_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    BY_NS_FIELD_NUMBER: _ClassVar[int]
    until_unix_ns: int
    by_ns: int
    def __init__(self, until_unix_ns: _Optional[int] = ..., by_ns: _Optional[int] = ...) -> None: ...

class CellHandover(_message.Message):
    __slots__ = ("sequences", "tenants")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[SequencePast]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantServed]
    def __init__(self, sequences: _Optional[_Iterable[_Union[SequencePast, _Mapping]]] = ..., tenants: _Optional[_Iterable[_Union[TenantServed, _Mapping]]] = ...) -> None: ...

class SequencePast(_message.Message):
    __slots__ = ("sequence_id", "num_preemptions", "deaths", "furthest")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    DEATHS_FIELD_NUMBER: _ClassVar[int]
    FURTHEST_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    num_preemptions: int
    deaths: int
    furthest: int
    def __init__(self, sequence_id: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., deaths: _Optional[int] = ..., furthest: _Optional[int] = ...) -> None: ...

class TenantServed(_message.Message):
    __slots__ = ("tenant", "tokens_ahead")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_AHEAD_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    tokens_ahead: int
    def __init__(self, tenant: _Optional[str] = ..., tokens_ahead: _Optional[int] = ...) -> None: ...

class FullTenant(_message.Message):
    __slots__ = ("tenant", "tokens_running", "tokens_max", "tokens_next")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    TOKENS_MAX_FIELD_NUMBER: _ClassVar[int]
    TOKENS_NEXT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    tokens_running: int
    tokens_max: int
    tokens_next: int
    def __init__(self, tenant: _Optional[str] = ..., tokens_running: _Optional[int] = ..., tokens_max: _Optional[int] = ..., tokens_next: _Optional[int] = ...) -> None: ...
