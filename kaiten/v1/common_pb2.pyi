from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]
    FINISH_REASON_DEADLINE_EXCEEDED: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]

class Feature(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FEATURE_UNSPECIFIED: _ClassVar[Feature]
    FEATURE_LOGPROBS: _ClassVar[Feature]
    FEATURE_PROMPT_LOGPROBS: _ClassVar[Feature]
    FEATURE_LOGITS_PROCESSORS: _ClassVar[Feature]
    FEATURE_STRUCTURED_OUTPUTS: _ClassVar[Feature]

class WhyPassedOver(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WHY_PASSED_OVER_UNSPECIFIED: _ClassVar[WhyPassedOver]
    WHY_PASSED_OVER_PLANS_IN_FLIGHT: _ClassVar[WhyPassedOver]
    WHY_PASSED_OVER_NOTHING_CHANGED: _ClassVar[WhyPassedOver]
    WHY_PASSED_OVER_DRAINING: _ClassVar[WhyPassedOver]
    WHY_PASSED_OVER_LATE: _ClassVar[WhyPassedOver]
    WHY_PASSED_OVER_NO_SLOT: _ClassVar[WhyPassedOver]
    WHY_PASSED_OVER_NO_BUDGET: _ClassVar[WhyPassedOver]
    WHY_PASSED_OVER_PREEMPTED: _ClassVar[WhyPassedOver]
    WHY_PASSED_OVER_CADENCE: _ClassVar[WhyPassedOver]
    WHY_PASSED_OVER_TOO_LARGE: _ClassVar[WhyPassedOver]
    WHY_PASSED_OVER_SUSPECT: _ClassVar[WhyPassedOver]
    WHY_PASSED_OVER_VERDICT: _ClassVar[WhyPassedOver]
    WHY_PASSED_OVER_ANOTHER_WORKER: _ClassVar[WhyPassedOver]
    WHY_PASSED_OVER_TENANT: _ClassVar[WhyPassedOver]
    WHY_PASSED_OVER_LONG_PREFILL: _ClassVar[WhyPassedOver]
    WHY_PASSED_OVER_BLOCKS: _ClassVar[WhyPassedOver]
    WHY_PASSED_OVER_MARGIN: _ClassVar[WhyPassedOver]
    WHY_PASSED_OVER_WORST_CASE: _ClassVar[WhyPassedOver]
    WHY_PASSED_OVER_RESERVED: _ClassVar[WhyPassedOver]
    WHY_PASSED_OVER_BATCH: _ClassVar[WhyPassedOver]
    WHY_PASSED_OVER_END_IS_NEAR: _ClassVar[WhyPassedOver]
    WHY_PASSED_OVER_PREFILL: _ClassVar[WhyPassedOver]
    WHY_PASSED_OVER_BATCH_GAP: _ClassVar[WhyPassedOver]
    WHY_PASSED_OVER_PLACE_NEEDED: _ClassVar[WhyPassedOver]
    WHY_PASSED_OVER_STEPS_TOO_LONG: _ClassVar[WhyPassedOver]
    WHY_PASSED_OVER_STORE_BEHIND: _ClassVar[WhyPassedOver]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CANCELLED: FinishReason
FINISH_REASON_DEADLINE_EXCEEDED: FinishReason
FINISH_REASON_ERROR: FinishReason
FEATURE_UNSPECIFIED: Feature
FEATURE_LOGPROBS: Feature
FEATURE_PROMPT_LOGPROBS: Feature
FEATURE_LOGITS_PROCESSORS: Feature
FEATURE_STRUCTURED_OUTPUTS: Feature
WHY_PASSED_OVER_UNSPECIFIED: WhyPassedOver
WHY_PASSED_OVER_PLANS_IN_FLIGHT: WhyPassedOver
WHY_PASSED_OVER_NOTHING_CHANGED: WhyPassedOver
WHY_PASSED_OVER_DRAINING: WhyPassedOver
WHY_PASSED_OVER_LATE: WhyPassedOver
WHY_PASSED_OVER_NO_SLOT: WhyPassedOver
WHY_PASSED_OVER_NO_BUDGET: WhyPassedOver
WHY_PASSED_OVER_PREEMPTED: WhyPassedOver
WHY_PASSED_OVER_CADENCE: WhyPassedOver
WHY_PASSED_OVER_TOO_LARGE: WhyPassedOver
WHY_PASSED_OVER_SUSPECT: WhyPassedOver
WHY_PASSED_OVER_VERDICT: WhyPassedOver
WHY_PASSED_OVER_ANOTHER_WORKER: WhyPassedOver
WHY_PASSED_OVER_TENANT: WhyPassedOver
WHY_PASSED_OVER_LONG_PREFILL: WhyPassedOver
WHY_PASSED_OVER_BLOCKS: WhyPassedOver
WHY_PASSED_OVER_MARGIN: WhyPassedOver
WHY_PASSED_OVER_WORST_CASE: WhyPassedOver
WHY_PASSED_OVER_RESERVED: WhyPassedOver
WHY_PASSED_OVER_BATCH: WhyPassedOver
WHY_PASSED_OVER_END_IS_NEAR: WhyPassedOver
WHY_PASSED_OVER_PREFILL: WhyPassedOver
WHY_PASSED_OVER_BATCH_GAP: WhyPassedOver
WHY_PASSED_OVER_PLACE_NEEDED: WhyPassedOver
WHY_PASSED_OVER_STEPS_TOO_LONG: WhyPassedOver
WHY_PASSED_OVER_STORE_BEHIND: WhyPassedOver

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "min_tokens", "ignore_eos", "stop_token_ids", "logprobs", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "bad_words", "prompt_logprobs", "structured_outputs")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[TokenBias]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    prompt_logprobs: int
    structured_outputs: StructuredOutputs
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., ignore_eos: bool = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[TokenBias, _Mapping]]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., prompt_logprobs: _Optional[int] = ..., structured_outputs: _Optional[_Union[StructuredOutputs, _Mapping]] = ...) -> None: ...

class StructuredOutputs(_message.Message):
    __slots__ = ("json", "json_object", "regex", "choice", "grammar", "disable_any_whitespace")
    JSON_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    DISABLE_ANY_WHITESPACE_FIELD_NUMBER: _ClassVar[int]
    json: str
    json_object: bool
    regex: str
    choice: Choices
    grammar: str
    disable_any_whitespace: bool
    def __init__(self, json: _Optional[str] = ..., json_object: bool = ..., regex: _Optional[str] = ..., choice: _Optional[_Union[Choices, _Mapping]] = ..., grammar: _Optional[str] = ..., disable_any_whitespace: bool = ...) -> None: ...

class Choices(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class TokenBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top_token_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("position", "token_count", "logprobs", "top_token_ids", "top_logprobs")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    position: int
    token_count: int
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, position: _Optional[int] = ..., token_count: _Optional[int] = ..., logprobs: _Optional[_Iterable[float]] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Leader(_message.Message):
    __slots__ = ("epoch", "nonce")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    nonce: int
    def __init__(self, epoch: _Optional[int] = ..., nonce: _Optional[int] = ...) -> None: ...

class WorkerDescription(_message.Message):
    __slots__ = ("boot_id", "model", "fingerprint", "architecture", "dtype", "device", "vocab_size", "context_tokens_max", "block_size", "block_count", "slots_max", "step_tokens_max", "mixed_tokens_max", "kv_dtype", "weights_digest", "tokenizer_digest", "capabilities")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_MAX_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    SLOTS_MAX_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_MAX_FIELD_NUMBER: _ClassVar[int]
    MIXED_TOKENS_MAX_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    model: str
    fingerprint: str
    architecture: str
    dtype: str
    device: str
    vocab_size: int
    context_tokens_max: int
    block_size: int
    block_count: int
    slots_max: int
    step_tokens_max: int
    mixed_tokens_max: int
    kv_dtype: str
    weights_digest: str
    tokenizer_digest: str
    capabilities: Capabilities
    def __init__(self, boot_id: _Optional[str] = ..., model: _Optional[str] = ..., fingerprint: _Optional[str] = ..., architecture: _Optional[str] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., vocab_size: _Optional[int] = ..., context_tokens_max: _Optional[int] = ..., block_size: _Optional[int] = ..., block_count: _Optional[int] = ..., slots_max: _Optional[int] = ..., step_tokens_max: _Optional[int] = ..., mixed_tokens_max: _Optional[int] = ..., kv_dtype: _Optional[str] = ..., weights_digest: _Optional[str] = ..., tokenizer_digest: _Optional[str] = ..., capabilities: _Optional[_Union[Capabilities, _Mapping]] = ...) -> None: ...

class Capabilities(_message.Message):
    __slots__ = ("slot_tokens_max", "layer_groups", "host_block_count", "plan_version", "features")
    SLOT_TOKENS_MAX_FIELD_NUMBER: _ClassVar[int]
    LAYER_GROUPS_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    PLAN_VERSION_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    slot_tokens_max: int
    layer_groups: _containers.RepeatedCompositeFieldContainer[LayerGroup]
    host_block_count: int
    plan_version: int
    features: _containers.RepeatedScalarFieldContainer[Feature]
    def __init__(self, slot_tokens_max: _Optional[int] = ..., layer_groups: _Optional[_Iterable[_Union[LayerGroup, _Mapping]]] = ..., host_block_count: _Optional[int] = ..., plan_version: _Optional[int] = ..., features: _Optional[_Iterable[_Union[Feature, str]]] = ...) -> None: ...

class LayerGroup(_message.Message):
    __slots__ = ("window_tokens", "layer_count", "blocks_max")
    WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAYER_COUNT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_MAX_FIELD_NUMBER: _ClassVar[int]
    window_tokens: int
    layer_count: int
    blocks_max: int
    def __init__(self, window_tokens: _Optional[int] = ..., layer_count: _Optional[int] = ..., blocks_max: _Optional[int] = ...) -> None: ...
