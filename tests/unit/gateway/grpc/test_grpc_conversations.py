"""What a conversation may say over gRPC alone: JSON has one value for each name, and one kind."""

from typing import Any

import pytest

from gateway.grpc.convert import chat_from_proto, tokenize_from_proto
from kaiten.v1 import inference_service_pb2 as pb
from kaiten.v1 import model_service_pb2 as model_pb
from service_kit.errors import InvalidRequest

Option = pb.TemplateOption


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([Option(name="thinking")], "'thinking' must have flag, text or number"),
        (
            [Option(name="thinking", flag=True), Option(name="thinking", flag=False)],
            "must not name an option twice, got 'thinking'",
        ),
    ],
)
def test_an_option_has_one_value(options: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        chat_from_proto(pb.Conversation(template_options=options))
    assert caught.value.field == "conversation.template_options"


def test_an_options_value_is_of_its_kind() -> None:
    options = [Option(name="a", flag=False), Option(name="b", text=""), Option(name="c", number=0)]
    told = chat_from_proto(pb.Conversation(template_options=options)).options
    assert told == (("a", False), ("b", ""), ("c", 0))


def test_what_cannot_be_generated_is_not_tokenized() -> None:
    choice = pb.ToolChoice(name="nobody")
    for field, request in (
        ("input", model_pb.TokenizeRequest()),
        (
            "conversation.tool_choice",
            model_pb.TokenizeRequest(conversation=pb.Conversation(tool_choice=choice)),
        ),
    ):
        with pytest.raises(InvalidRequest) as caught:
            tokenize_from_proto(request)
        assert caught.value.field == field
