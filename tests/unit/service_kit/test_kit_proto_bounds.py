"""What a message would make is counted without making it."""

from hypothesis import given
from hypothesis import strategies as st

from kaiten.v1 import inference_service_pb2 as pb
from kaiten.v1.common_pb2 import SamplingParams, TokenBias
from service_kit.proto_bounds import records

KIND = pb.GenerateRequest.DESCRIPTOR
BATCH = pb.GenerateBatchRequest.DESCRIPTOR


def test_fields_of_messages_in_messages_are_counted() -> None:
    sampling = SamplingParams(temperature=0.5, logit_bias=[TokenBias(token_id=1, bias=2)] * 3)
    each = pb.GenerateRequest(text="x", stop=["a", "b"], sampling=sampling)
    # text, two stops, sampling; in it a temperature and three biases of two fields.
    assert records(each.SerializeToString(), KIND, 1000) == 4 + 1 + 3 + 6
    batch = pb.GenerateBatchRequest(requests=[each, each])
    assert records(batch.SerializeToString(), BATCH, 1000) == 2 * (1 + 14)


def test_packed_numbers_are_one_field() -> None:
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(10_000)))
    assert records(request.SerializeToString(), KIND, 1000) == 2


def test_counting_ends_at_one_too_many() -> None:
    batch = pb.GenerateBatchRequest(requests=[pb.GenerateRequest()] * 1000)
    assert records(batch.SerializeToString(), BATCH, 10) == 11


@given(st.binary(max_size=200))
def test_bytes_that_are_no_message_are_the_parsers_to_refuse(raw: bytes) -> None:
    assert 0 <= records(raw, BATCH, 1000) <= len(raw)
