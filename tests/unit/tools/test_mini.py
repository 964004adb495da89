"""The shipped model: its grammar, its checkpoint folder, and what it says.

transformers is the oracle for the template and the generation. It runs in a process of its own, so
that its import (seconds, and a module named like one of our folders) stays out of this one; the
training script runs there too.
"""

import json
import os
import random
import re
import subprocess
import sys
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import minijinja
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from kaiten.mini import CHECKPOINT
from tests.support.once import made_once
from tools.mini import grammar, tokens

ROOT = Path(__file__).parents[3]

FILES = {
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}

ASKED = (
    "Hello!",
    "Is the salmon fresh?",
    "What is on the belt today?",
    "How does continuous batching work?",
    "Count to twenty.",
    "How do I make eel sushi?",
    "Tell me a story about a salmon plate.",
    "Tell me a long story about Hana.",
)

ORACLE = """
import json, sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer
torch.set_num_threads(1)
torch.manual_seed(0)
folder, work = sys.argv[1], json.load(sys.stdin)
tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
chat = lambda turns, prompt: tokenizer.apply_chat_template(
    turns, tokenize=False, add_generation_prompt=prompt)
shown = [chat([{"role": "user", "content": text}], True) for text in work["asked"]] + work["begun"]
batch = tokenizer(shown, add_special_tokens=False, padding=True, return_tensors="pt")
start, stops = batch.input_ids.shape[1], model.generation_config.eos_token_id
def generate(**settings):
    made = model.generate(**batch, max_new_tokens=96, **settings)
    # Most have ended; the others go on without them.
    going = ~torch.isin(made[:, start:], torch.tensor(stops)).any(1)
    seen = torch.cat([batch.attention_mask, torch.ones_like(made[:, start:])], 1)
    last = model.generate(
        input_ids=made[going], attention_mask=seen[going], max_new_tokens=224, **settings)
    rows, longer = made[:, start:].tolist(), iter(last[:, start:].tolist())
    rows = [next(longer) if goes else row for row, goes in zip(rows, going.tolist())]
    ends = [[at for at, token in enumerate(row, 1) if token in stops] for row in rows]
    lengths = [at[0] if at else None for at in ends]
    return {"lengths": lengths, "texts": tokenizer.batch_decode(rows, skip_special_tokens=True)}
Path(sys.argv[2]).write_text(json.dumps({
    "rendered": [[chat(turns, prompt) for prompt in (False, True)] for turns in work["chats"]],
    "bos": tokenizer("The chef").input_ids[0],
    "greedy": generate(do_sample=False),
    "warm": generate(do_sample=True, temperature=0.7, top_k=0),
}))
"""

# A model too small to speak, through the whole of the training script.
TRAINING = """
from tools.mini import tokens, train
recipe = train.Recipe(steps=3, rows_per_step=2, hidden=128, layers=1, sample_tokens_max=4)
tokenizer = tokens.train_tokenizer(seed=recipe.seed, documents=200, vocab_size=600)
model = train.train(recipe, tokenizer)
batch = next(train.batches(recipe, tokenizer, seed=1))
look = lambda: model(input_ids=batch.ids, attention_mask=batch.mask(), use_cache=False).logits[0]
before = look()
batch.ids[0, 3] = 99
moved = (look() - before).abs().amax(-1) > 0
first = batch.documents[0] == 1
assert moved[first][3:].all(), "a document sees itself"
assert not moved[~first].any(), "a document sees no other"
assert [train.rate(recipe, step) for step in (0, recipe.warmup_steps)] == [1 / 80, 1.0]
train.save(Path(sys.argv[3]), recipe, tokenizer, model)
"""


def run_python(program: str, *arguments: str, stdin: str = "") -> str:
    """The output of a program in a fresh interpreter, from the root of the checkout."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


@pytest.fixture(scope="module")
def chats() -> list[list[dict[str, str]]]:
    rng = random.Random(5)
    return [[asdict(turn) for turn in grammar.chat(rng)] for _ in range(20)]


@pytest.fixture(scope="module")
def questions() -> list[str]:
    rng = random.Random(77)
    return [*ASKED, *(grammar.question(rng)[0] for _ in range(28))]


@pytest.fixture(scope="module")
def made(
    chats: list[list[dict[str, str]]],
    questions: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """What the oracle said, the folder that training wrote, and what it printed."""
    work = {"chats": chats, "asked": questions, "begun": ["<|bos|>The chef"]}

    def make(folder: Path) -> None:
        words = (str(CHECKPOINT), str(folder / "said.json"), str(folder / "trained"))
        printed = run_python(ORACLE + TRAINING, *words, stdin=json.dumps(work))
        (folder / "printed").write_text(printed)

    return made_once(tmp_path_factory, "mini", make)


@pytest.fixture(scope="module")
def oracle(made: Path) -> Any:
    return json.loads((made / "said.json").read_text())


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z]+(?:-[a-z]+)?", text.lower())


def percentile(values: list[int], percent: int) -> int:
    return sorted(values)[len(values) * percent // 100]


def test_a_seed_is_a_corpus() -> None:
    def corpus(seed: int) -> list[object]:
        rng = random.Random(seed)
        return [(grammar.text(rng), grammar.chat(rng)) for _ in range(50)]

    assert corpus(3) == corpus(3)
    assert corpus(3) != corpus(4)


def test_answers_are_of_very_different_lengths() -> None:
    rng = random.Random(0)
    counts = [len(grammar.question(rng)[1].split()) for _ in range(2000)]
    assert min(counts) == 1
    assert percentile(counts, 10) <= 3
    assert percentile(counts, 90) >= 100
    assert 200 <= max(counts) <= 270


def test_every_word_said_is_a_word_of_the_grammar() -> None:
    rng = random.Random(1)
    said = set()
    for _ in range(2000):
        said.update(words_of(grammar.text(rng) + " " + grammar.question(rng)[1]))
    assert said <= grammar.words()
    assert len(said) > 0.95 * len(grammar.words())  # and hardly a production is unreachable


def test_no_hole_is_left_and_no_bound_word_hides_a_symbol() -> None:
    rng = random.Random(2)
    texts = [grammar.text(rng) for _ in range(500)]
    texts += [turn.content for _ in range(500) for turn in grammar.chat(rng)]
    assert not [text for text in texts if re.search(r"[{}\[\]|]", text)]
    assert not grammar.bind(rng).keys() & grammar.SYMBOLS.keys()


def test_a_story_stays_with_its_dish() -> None:
    rng = random.Random(3)
    bound = grammar.bind(rng)
    told = grammar.long_story(rng, bound)
    assert bound["dish"] in told
    assert bound["guest"] in told
    paragraphs = told.split("\n\n")
    assert len(paragraphs) == 3


def test_no_sentence_comes_twice_in_a_long_story() -> None:
    rng = random.Random(4)
    for _ in range(200):
        told = grammar.long_story(rng, grammar.bind(rng))
        sentences = re.split(r"(?<=[.?\"]) +|\n+", told)
        assert len(sentences) == len(set(sentences))


def test_chats_alternate_and_end_with_an_answer(chats: list[list[dict[str, str]]]) -> None:
    for turns in chats:
        roles = [turn["role"] for turn in turns if turn["role"] != "system"]
        assert roles[0] == "user"
        assert roles[-1] == "assistant"
        assert all(before != after for before, after in pairwise(roles))


def test_the_checkpoint_is_complete_and_small() -> None:
    assert {path.name for path in CHECKPOINT.iterdir()} == FILES
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) <= 8_000_000


def test_the_config_says_what_the_weights_are(tokenizer: Tokenizer) -> None:
    config = json.loads((CHECKPOINT / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["max_position_embeddings"] == 1024
    assert config["tie_word_embeddings"] is True
    assert config["vocab_size"] == tokenizer.get_vocab_size()
    with safe_open(CHECKPOINT / "model.safetensors", framework="pt") as weights:
        names = set(weights.keys())
        dtypes = {weights.get_slice(name).get_dtype() for name in names}
        embedding = weights.get_slice("model.embed_tokens.weight").get_shape()
    assert "lm_head.weight" not in names
    assert dtypes == {"BF16"}
    assert embedding == [config["vocab_size"], config["hidden_size"]]


def test_generation_stops_at_the_end_of_a_text_and_of_a_turn() -> None:
    settings = json.loads((CHECKPOINT / "generation_config.json").read_text())
    assert settings["eos_token_id"] == list(tokens.STOP_IDS)
    assert settings["bos_token_id"] == tokens.special_id(tokens.BOS)


def test_special_tokens_are_single_ids_in_order(tokenizer: Tokenizer) -> None:
    encoded = [tokenizer.encode(name, add_special_tokens=False).ids for name in tokens.SPECIALS]
    assert encoded == [[index] for index in range(len(tokens.SPECIALS))]


@pytest.mark.parametrize("seed", range(3))
def test_every_text_comes_back_from_its_tokens(tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    texts = [grammar.text(rng) for _ in range(200)]
    texts += [turn.content for _ in range(200) for turn in grammar.chat(rng)]
    texts += ["", " two  spaces ", "日本語 🍣\t\n", "naïve\u0000"]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_retrained_tokenizer_is_the_committed_one(tokenizer: Tokenizer) -> None:
    again = tokens.train_tokenizer(seed=7, documents=8000, vocab_size=tokenizer.get_vocab_size())
    assert again.get_vocab() == tokenizer.get_vocab()


def test_the_loss_counts_only_what_the_model_says(tokenizer: Tokenizer) -> None:
    turns = [
        grammar.Turn(role="user", content="Is the salmon fresh?"),
        grammar.Turn(role="assistant", content="Yes."),
    ]
    ids, counted = tokens.encode_chat(tokenizer, turns)
    spoken = [token for token, is_counted in zip(ids, counted, strict=True) if is_counted]
    assert tokenizer.decode(spoken, skip_special_tokens=False) == "Yes.<|end|>"
    assert ids == tokenizer.encode(tokens.chat_text(turns), add_special_tokens=False).ids


def test_rows_hold_whole_documents_and_little_air(tokenizer: Tokenizer) -> None:
    rows = tokens.rows(tokenizer, random.Random(0), length=384)
    sizes = []
    for row in (next(rows) for _ in range(50)):
        for ids, counted in row:
            assert len(ids) == len(counted)
            assert ids[0] == tokens.special_id(tokens.BOS)
            assert ids[-1] in tokens.STOP_IDS
        sizes.append(sum(len(ids) for ids, _ in row))
    assert max(sizes) <= 384
    assert sum(sizes) >= 0.95 * 384 * len(sizes)


def test_the_training_script_writes_a_whole_checkpoint(made: Path) -> None:
    assert "step     3  loss" in (made / "printed").read_text()
    trained = made / "trained"
    assert {path.name for path in trained.iterdir()} == FILES
    config = json.loads((trained / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"]) == (128, 1)
    card = (trained / "README.md").read_text()
    assert "3 seeded steps" in card
    assert "**Limits**: in 3 steps" in card
    assert "**Tell me a story about a salmon plate.**" in card


def test_the_template_is_the_training_format_everywhere(
    chats: list[list[dict[str, str]]], oracle: Any
) -> None:
    config = json.loads((CHECKPOINT / "tokenizer_config.json").read_text())
    engine = minijinja.Environment(templates={"chat": config["chat_template"]})
    for turns, (plain, prompted) in zip(chats, oracle["rendered"], strict=True):
        values: dict[str, Any] = {"messages": turns, "bos_token": config["bos_token"]}
        assert engine.render_template("chat", add_generation_prompt=False, **values) == plain
        assert engine.render_template("chat", add_generation_prompt=True, **values) == prompted
        assert plain == tokens.chat_text([grammar.Turn(**turn) for turn in turns])  # type: ignore[arg-type]
        assert prompted == plain + "<|assistant|>"


def test_the_tokenizer_begins_a_plain_text_with_bos(oracle: Any, tokenizer: Tokenizer) -> None:
    assert oracle["bos"] == tokens.special_id(tokens.BOS) == tokenizer.encode("The chef").ids[0]


@pytest.mark.parametrize("manner", ["greedy", "warm"])
def test_the_model_stops_by_itself_at_very_different_lengths(oracle: Any, manner: str) -> None:
    lengths = oracle[manner]["lengths"]
    stopped = [length for length in lengths if length is not None]
    assert len(stopped) == len(lengths)
    assert percentile(stopped, 10) <= 8
    assert percentile(stopped, 90) >= 120


@pytest.mark.parametrize("manner", ["greedy", "warm"])
def test_the_model_uses_the_words_of_the_grammar(oracle: Any, manner: str) -> None:
    said = [word for text in oracle[manner]["texts"] for word in words_of(text)]
    known = grammar.words()
    assert len(said) > 500
    assert sum(word in known for word in said) >= 0.95 * len(said)


def test_the_model_answers_what_was_asked(oracle: Any) -> None:
    told = dict(zip(ASKED, oracle["greedy"]["texts"], strict=False))
    assert told["Is the salmon fresh?"].startswith("Yes")
    assert "belt" in told["What is on the belt today?"].lower()
    assert "seat" in told["How does continuous batching work?"]
    assert told["Count to twenty."].startswith("One, two, three, four, five, six, seven")
    assert told["How do I make eel sushi?"].count("eel") >= 2
    assert "salmon" in told["Tell me a story about a salmon plate."]
    assert told["Tell me a long story about Hana."].count("\n\n") == 2
