"""Names of OpenTelemetry's semantic conventions that our spans and metrics carry, in one place.

GenAI and messaging, as of the newest `opentelemetry-semantic-conventions`, which is still moving:
`tests/unit/service_kit/test_kit_semconv.py` compares, so that a name that is given up is noticed. A
request is a GenAI span; on its way through the ledger's inbox it is a message, which the gateway
sends and the leader receives. What the conventions have no name for begins with `kaiten.`. No
attribute carries text of a request, so no messages, and no stop sequences.
"""

from typing import Final

GEN_AI_OPERATION_NAME: Final = "gen_ai.operation.name"
GEN_AI_PROVIDER_NAME: Final = "gen_ai.provider.name"
GEN_AI_REQUEST_CHOICE_COUNT: Final = "gen_ai.request.choice.count"
GEN_AI_REQUEST_FREQUENCY_PENALTY: Final = "gen_ai.request.frequency_penalty"
GEN_AI_REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"
GEN_AI_REQUEST_PRESENCE_PENALTY: Final = "gen_ai.request.presence_penalty"
GEN_AI_REQUEST_SEED: Final = "gen_ai.request.seed"
GEN_AI_REQUEST_STREAM: Final = "gen_ai.request.stream"
GEN_AI_REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
GEN_AI_REQUEST_TOP_K: Final = "gen_ai.request.top_k"
GEN_AI_REQUEST_TOP_P: Final = "gen_ai.request.top_p"
GEN_AI_RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
GEN_AI_RESPONSE_ID: Final = "gen_ai.response.id"
GEN_AI_RESPONSE_MODEL: Final = "gen_ai.response.model"
GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
GEN_AI_USAGE_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"

MESSAGING_DESTINATION_NAME: Final = "messaging.destination.name"
MESSAGING_MESSAGE_ID: Final = "messaging.message.id"
MESSAGING_OPERATION_NAME: Final = "messaging.operation.name"
MESSAGING_OPERATION_TYPE: Final = "messaging.operation.type"
MESSAGING_SYSTEM: Final = "messaging.system"

ERROR_TYPE: Final = "error.type"

# Values.
CHAT: Final = "chat"
TEXT_COMPLETION: Final = "text_completion"
PROVIDER: Final = "kaiten"
SEND: Final = "send"
RECEIVE: Final = "receive"
# Of the inbox: a stream of the store.
_INBOX: Final = {MESSAGING_SYSTEM: "redis", MESSAGING_DESTINATION_NAME: "inbox"}


def inbox_sent(request_id: str) -> dict[str, str]:
    """Of the span in which a request is put into the ledger's inbox."""
    operation = {MESSAGING_OPERATION_TYPE: SEND, MESSAGING_OPERATION_NAME: SEND}
    return {**_INBOX, **operation, MESSAGING_MESSAGE_ID: request_id}


def inbox_received(request_id: str) -> dict[str, str]:
    """Of the span in which it waits there, and in the queue."""
    operation = {MESSAGING_OPERATION_TYPE: RECEIVE, MESSAGING_OPERATION_NAME: RECEIVE}
    return {**_INBOX, **operation, MESSAGING_MESSAGE_ID: request_id}
