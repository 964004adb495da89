"""Positions: overlaps are taken once, holes are noticed, folding loses nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kaiten.v1.common_pb2 import PromptLogprobs, TokenLogprobs
from kaiten.v1.ledger_pb2 import (
    FoldedTokens,
    JournalRecord,
    SequenceLogprobs,
    StoredPromptLogprobs,
)
from ledger import DamagedLedger, pieces_of
from ledger.tokens import Outputs, cut, joined, tokens_of
from tests.support.play_leader import stopped


@st.composite
def journals(draw: st.DrawFn) -> tuple[list[JournalRecord], dict[int, list[int]], set[int]]:
    """Records of up to four sequences, some of which want log-probabilities, and their outputs."""
    with_logprobs = draw(st.sets(st.integers(1, 4)))
    outputs: dict[int, list[int]] = {sequence_id: [] for sequence_id in range(1, 5)}
    records = []
    for seq, sequence_ids in enumerate(draw(st.lists(st.lists(st.integers(1, 4)), max_size=12)), 1):
        record = JournalRecord(seq=seq)
        for sequence_id in sequence_ids:
            token_id = draw(st.integers(0, 2**32 - 1))
            record.sequence_ids.append(sequence_id)
            record.positions.append(len(outputs[sequence_id]))
            record.token_ids.append(token_id)
            outputs[sequence_id].append(token_id)
            if sequence_id in with_logprobs:
                logprobs = TokenLogprobs(top_token_ids=[token_id])
                record.logprobs.append(SequenceLogprobs(sequence_id=sequence_id, logprobs=logprobs))
        records.append(record)
    return records, outputs, with_logprobs


@given(journal=journals(), data=st.data())
def test_fold_and_any_overlapping_tail_give_the_whole_output(
    journal: tuple[list[JournalRecord], dict[int, list[int]], set[int]], data: st.DataObject
) -> None:
    records, expected, with_logprobs = journal
    folded_seq = data.draw(st.integers(0, len(records)))
    tail_from = data.draw(st.integers(0, folded_seq))
    middle = data.draw(st.integers(0, folded_seq))
    # Two folds, appended as bytes: protobuf merges them.
    first, second = pieces_of(records[:middle]), pieces_of(records[middle:folded_seq])
    folded = {
        sequence_id: FoldedTokens.FromString(
            first.get(sequence_id, FoldedTokens()).SerializeToString()
            + second.get(sequence_id, FoldedTokens()).SerializeToString()
        )
        for sequence_id in expected
    }
    outputs = Outputs(folded)
    for record in records[tail_from:]:
        outputs.apply(record)
    for sequence_id, token_ids in expected.items():
        output = outputs.tokens[sequence_id]
        assert list(output.token_ids) == token_ids
        tops = [entry.top_token_ids[0] for entry in output.logprobs]
        assert tops == (token_ids if sequence_id in with_logprobs else [])


def test_a_missing_token_is_damage_and_strangers_are_ignored() -> None:
    outputs = Outputs({1: FoldedTokens(token_ids=[5])})
    outputs.apply(JournalRecord(seq=1, sequence_ids=[9], positions=[7], token_ids=[1]))
    outputs.apply(JournalRecord(seq=2, sequence_ids=[1], positions=[3], token_ids=[1]))
    outputs.apply(JournalRecord(seq=3, sequence_ids=[1], positions=[1], token_ids=[1]))
    assert outputs.damaged == {1: "sequence 1 lacks tokens [1, 3) before journal record 2"}
    assert list(outputs.tokens[1].token_ids) == [5]


def test_columns_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        list(tokens_of(JournalRecord(sequence_ids=[1, 2], positions=[0], token_ids=[1, 2])))


@pytest.mark.parametrize(("output_tokens", "kept"), [(0, 0), (2, 2), (3, 3), (4, 3)])
def test_an_output_is_cut_where_its_stop_string_began(output_tokens: int, kept: int) -> None:
    output = FoldedTokens(token_ids=[1, 2, 3], logprobs=[TokenLogprobs()] * 3)
    result = cut(output, stopped(1, output_tokens))
    assert list(result.token_ids) == [1, 2, 3][:kept]
    assert len(result.logprobs) == kept
    assert cut(output, None) == output


@given(lengths=st.lists(st.integers(1, 4), max_size=5), k=st.integers(0, 3))
def test_the_pieces_of_an_explained_prompt_make_one_run(lengths: list[int], k: int) -> None:
    stored, position = b"", 1
    for length in lengths:
        run = PromptLogprobs(
            position=position,
            token_count=length,
            logprobs=range(position, position + length),
            top_token_ids=range(position * k, (position + length) * k),
            top_logprobs=range(position * k, (position + length) * k),
        )
        stored += StoredPromptLogprobs(runs=[run]).SerializeToString()
        position += length
    whole = joined(StoredPromptLogprobs.FromString(stored))
    assert (whole.position, whole.token_count) == (1, sum(lengths))
    assert list(whole.logprobs) == list(range(1, position))
    assert list(whole.top_token_ids) == list(range(k, position * k))
    assert list(whole.top_logprobs) == list(range(k, position * k))


@pytest.mark.parametrize("starts", [(2,), (1, 1), (1, 4), (0,)])
def test_a_prompt_with_a_hole_or_an_overlap_is_damage(starts: tuple[int, ...]) -> None:
    runs = [PromptLogprobs(position=start, token_count=2) for start in starts]
    with pytest.raises(DamagedLedger, match="are next"):
        joined(StoredPromptLogprobs(runs=runs))
