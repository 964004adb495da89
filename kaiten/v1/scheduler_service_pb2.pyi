from kaiten.v1 import archive_pb2 as _archive_pb2
from kaiten.v1 import common_pb2 as _common_pb2
from kaiten.v1 import ledger_pb2 as _ledger_pb2
from kaiten.v1 import timeline_pb2 as _timeline_pb2
from kaiten.v1 import watch_pb2 as _watch_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RehearseRequest(_message.Message):
    __slots__ = ("worker_id", "policy", "requests", "between_us")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    BETWEEN_US_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    policy: str
    requests: _containers.RepeatedCompositeFieldContainer[RehearsedRequest]
    between_us: int
    def __init__(self, worker_id: _Optional[str] = ..., policy: _Optional[str] = ..., requests: _Optional[_Iterable[_Union[RehearsedRequest, _Mapping]]] = ..., between_us: _Optional[int] = ...) -> None: ...

class RehearsedRequest(_message.Message):
    __slots__ = ("arrived_us", "num_prompt_tokens", "num_output_tokens")
    ARRIVED_US_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    arrived_us: int
    num_prompt_tokens: int
    num_output_tokens: int
    def __init__(self, arrived_us: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ...) -> None: ...

class RehearseResponse(_message.Message):
    __slots__ = ("configured", "steps")
    CONFIGURED_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    configured: _ledger_pb2.ConfiguredInput
    steps: _watch_pb2.WatchedSteps
    def __init__(self, configured: _Optional[_Union[_ledger_pb2.ConfiguredInput, _Mapping]] = ..., steps: _Optional[_Union[_watch_pb2.WatchedSteps, _Mapping]] = ...) -> None: ...

class ReadTimelineRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class ReadTimelineResponse(_message.Message):
    __slots__ = ("choices", "traceparent")
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    choices: _containers.RepeatedCompositeFieldContainer[_timeline_pb2.ChoiceTimeline]
    traceparent: str
    def __init__(self, choices: _Optional[_Iterable[_Union[_timeline_pb2.ChoiceTimeline, _Mapping]]] = ..., traceparent: _Optional[str] = ...) -> None: ...

class ReplayTimelineRequest(_message.Message):
    __slots__ = ("ids", "since_unix_ns")
    IDS_FIELD_NUMBER: _ClassVar[int]
    SINCE_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[str]
    since_unix_ns: int
    def __init__(self, ids: _Optional[_Iterable[str]] = ..., since_unix_ns: _Optional[int] = ...) -> None: ...

class ReplayTimelineResponse(_message.Message):
    __slots__ = ("id", "choices", "traceparent", "skipped")
    ID_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    id: str
    choices: _containers.RepeatedCompositeFieldContainer[_timeline_pb2.ChoiceTimeline]
    traceparent: str
    skipped: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, id: _Optional[str] = ..., choices: _Optional[_Iterable[_Union[_timeline_pb2.ChoiceTimeline, _Mapping]]] = ..., traceparent: _Optional[str] = ..., skipped: _Optional[_Iterable[str]] = ...) -> None: ...

class ReadArchiveRequest(_message.Message):
    __slots__ = ("after_epoch", "after_seq", "since_unix_ns", "until_unix_ns", "id")
    AFTER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQ_FIELD_NUMBER: _ClassVar[int]
    SINCE_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    UNTIL_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    after_epoch: int
    after_seq: int
    since_unix_ns: int
    until_unix_ns: int
    id: str
    def __init__(self, after_epoch: _Optional[int] = ..., after_seq: _Optional[int] = ..., since_unix_ns: _Optional[int] = ..., until_unix_ns: _Optional[int] = ..., id: _Optional[str] = ...) -> None: ...

class ReadArchiveResponse(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[_archive_pb2.ArchiveEntry]
    def __init__(self, entries: _Optional[_Iterable[_Union[_archive_pb2.ArchiveEntry, _Mapping]]] = ...) -> None: ...

class ConfigureRequest(_message.Message):
    __slots__ = ("settings",)
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    settings: _containers.ScalarMap[str, str]
    def __init__(self, settings: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ConfigureResponse(_message.Message):
    __slots__ = ("configured",)
    CONFIGURED_FIELD_NUMBER: _ClassVar[int]
    configured: _ledger_pb2.ConfiguredInput
    def __init__(self, configured: _Optional[_Union[_ledger_pb2.ConfiguredInput, _Mapping]] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("address", "worker")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    address: str
    worker: _common_pb2.WorkerDescription
    def __init__(self, address: _Optional[str] = ..., worker: _Optional[_Union[_common_pb2.WorkerDescription, _Mapping]] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("heartbeat_interval_ms",)
    HEARTBEAT_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    heartbeat_interval_ms: int
    def __init__(self, heartbeat_interval_ms: _Optional[int] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("boot_id", "is_draining")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    is_draining: bool
    def __init__(self, boot_id: _Optional[str] = ..., is_draining: bool = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("must_register", "is_drained")
    MUST_REGISTER_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINED_FIELD_NUMBER: _ClassVar[int]
    must_register: bool
    is_drained: bool
    def __init__(self, must_register: bool = ..., is_drained: bool = ...) -> None: ...

class StandByRequest(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class StandByResponse(_message.Message):
    __slots__ = ("leader",)
    LEADER_FIELD_NUMBER: _ClassVar[int]
    leader: _common_pb2.Leader
    def __init__(self, leader: _Optional[_Union[_common_pb2.Leader, _Mapping]] = ...) -> None: ...

class GetStateRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStateResponse(_message.Message):
    __slots__ = ("is_leader", "leader", "journal_seq", "waiting", "running", "policy", "workers")
    IS_LEADER_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_SEQ_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    is_leader: bool
    leader: _common_pb2.Leader
    journal_seq: int
    waiting: int
    running: int
    policy: str
    workers: _containers.RepeatedCompositeFieldContainer[WorkerState]
    def __init__(self, is_leader: bool = ..., leader: _Optional[_Union[_common_pb2.Leader, _Mapping]] = ..., journal_seq: _Optional[int] = ..., waiting: _Optional[int] = ..., running: _Optional[int] = ..., policy: _Optional[str] = ..., workers: _Optional[_Iterable[_Union[WorkerState, _Mapping]]] = ...) -> None: ...

class WorkerState(_message.Message):
    __slots__ = ("worker_id", "address", "is_connected", "running", "blocks_free", "block_count", "plans_in_flight", "description")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    IS_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    PLANS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    is_connected: bool
    running: int
    blocks_free: int
    block_count: int
    plans_in_flight: int
    description: _common_pb2.WorkerDescription
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ..., is_connected: bool = ..., running: _Optional[int] = ..., blocks_free: _Optional[int] = ..., block_count: _Optional[int] = ..., plans_in_flight: _Optional[int] = ..., description: _Optional[_Union[_common_pb2.WorkerDescription, _Mapping]] = ...) -> None: ...
