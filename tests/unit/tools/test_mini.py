"""The shipped model: its grammar, its checkpoint folder, and what it says.

transformers is the oracle for the template and the generation. It runs in a process of its own, so
that its import (seconds, and a module named like one of our folders) stays out of this one; the
training script runs there too.
"""

import json
import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from gateway.text.chat_template import ChatTemplate, TemplateFailed
from gateway.text.tools.formats import tool_format
from kaiten.mini import CHECKPOINT
from tests.support import warm_python
from tests.support.once import made_once
from tools.mini import chats, grammar, orders, tokens, world

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
from dataclasses import asdict
from pathlib import Path
from tokenizers import Tokenizer
from tools.mini import evaluate
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessorList
torch.set_num_threads(1)
torch.manual_seed(0)
folder, work = sys.argv[1], json.load(sys.stdin)
tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
chat = lambda turns, prompt, tools=None: tokenizer.apply_chat_template(
    turns, tools=tools, tokenize=False, add_generation_prompt=prompt)
shown = [chat([{"role": "user", "content": text}], True) for text in work["asked"]] + work["begun"]
# Greedy and warm at once, each step being dear for whatever rows: the likeliest after Gumbel noise,
# as wide as the temperature, is drawn from the softmax at that temperature.
batch = tokenizer(shown * 2, add_special_tokens=False, padding=True, return_tensors="pt")
start, stops = batch.input_ids.shape[1], model.generation_config.eos_token_id
warmth = torch.tensor([0.0] * len(shown) + [0.7] * len(shown))[:, None]
def generate(ids, mask, count, warmth):
    noise = lambda _, scores: scores - warmth * torch.empty_like(scores).exponential_().log()
    return model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=count, do_sample=False,
        logits_processor=LogitsProcessorList([noise]))
made = generate(batch.input_ids, batch.attention_mask, 96, warmth)
# Most have ended; the others go on without them.
going = ~torch.isin(made[:, start:], torch.tensor(stops)).any(1)
seen = torch.cat([batch.attention_mask, torch.ones_like(made[:, start:])], 1)
last = generate(made[going], seen[going], 224, warmth[going])
rows, longer = made[:, start:].tolist(), iter(last[:, start:].tolist())
rows = [next(longer) if goes else row for row, goes in zip(rows, going.tolist())]
def told(rows):
    ends = [[at for at, token in enumerate(row, 1) if token in stops] for row in rows]
    lengths = [at[0] if at else None for at in ends]
    return {"lengths": lengths, "texts": tokenizer.batch_decode(rows, skip_special_tokens=True)}
Path(sys.argv[2]).write_text(json.dumps({
    "rendered": [[chat(turns, prompt, tools) for prompt in (False, True)]
                 for turns, tools in work["chats"]],
    "bos": tokenizer("The chef").input_ids[0],
    "greedy": told(rows[:len(shown)]),
    "figures": [asdict(each) for each in evaluate.figures(
        Tokenizer.from_file(folder + "/tokenizer.json"), model, count=8)],
    "warm": told(rows[len(shown):]),
}))
"""

# A model too small to speak, through the whole of the training script.
TRAINING = """
from tools.mini import evaluate, tokens, train
recipe = train.Recipe(
    steps=2, rows_per_step=2, hidden=128, layers=1, sample_tokens_max=4, questions=2,
    answer_tokens_max=4)
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
case = evaluate.cases(1)["`order` called, with the right arguments"][0]
assert case.is_right(case.right + tokens.END)
assert not case.is_right(case.right.replace("order", "pay"))
assert not case.is_right("Very well.")
assert [train.rate(recipe, step) for step in (0, recipe.warmup_steps)] == [1 / 80, 1.0]
train.save(Path(sys.argv[3]), recipe, tokenizer, model)
"""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


@pytest.fixture(scope="module")
def told() -> list[chats.Chat]:
    rng = random.Random(5)
    return [chats.chat(rng) for _ in range(40)]


@pytest.fixture(scope="module")
def questions() -> list[str]:
    rng = random.Random(77)
    return [*ASKED, *(grammar.question(rng)[0] for _ in range(12))]


@pytest.fixture(scope="module")
def made(
    told: list[chats.Chat],
    questions: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """What the oracle said, the folder that training wrote, and what it printed."""
    shown = [[messages_of(chat), chat.tools or None] for chat in told]
    work = {"chats": shown, "asked": questions, "begun": ["<|bos|>The chef"]}

    def make(folder: Path) -> None:
        words = (str(CHECKPOINT), str(folder / "said.json"), str(folder / "trained"))
        done = warm_python.run(
            *("-c", ORACLE + TRAINING, *words),
            imports=warm_python.TRANSFORMERS,
            stdin=json.dumps(work),
        )
        assert done.code == 0, done.err
        (folder / "printed").write_text(done.out)

    return made_once(tmp_path_factory, "mini", make)


@pytest.fixture(scope="module")
def oracle(made: Path) -> Any:
    return json.loads((made / "said.json").read_text())


def messages_of(chat: chats.Chat) -> list[dict[str, Any]]:
    return [turn.message() for turn in chat.turns]


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z]+(?:-[a-z]+)?", text.lower())


def percentile(values: list[int], percent: int) -> int:
    return sorted(values)[len(values) * percent // 100]


def test_a_seed_is_a_corpus() -> None:
    def corpus(seed: int) -> list[object]:
        rng = random.Random(seed)
        return [(grammar.text(rng), chats.chat(rng)) for _ in range(50)]

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
    texts += [turn.content for _ in range(500) for turn in chats.talk(rng).turns]
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


def test_chats_alternate_and_end_with_an_answer(told: list[chats.Chat]) -> None:
    for chat in told:
        roles = [turn.role for turn in chat.turns if turn.role != "system"]
        assert roles[0] == "user"
        assert roles[-1] == "assistant"
        assert chat.turns[-1].call is None
        assert all(before != after for before, after in pairwise(roles))


def test_a_call_is_of_a_tool_that_is_there_and_takes_what_was_said() -> None:
    rng = random.Random(6)
    called, idle = 0, 0
    for chat in (chats.tool_talk(rng) for _ in range(500)):
        offered = {tool["function"]["name"] for tool in chat.tools}
        for asked, turn in pairwise(chat.turns):
            if asked.role != "user":
                continue
            if turn.call is None:
                idle += 1
                continue
            called += 1
            assert turn.call.name in offered
            said = asked.content.lower()
            assert str(turn.call.arguments["dish"]) in said
            if (plates := turn.call.arguments.get("plates", 1)) != 1:
                assert isinstance(plates, int)
                assert str(plates) in said or world.NUMBERS[plates - 1] in said
    assert called > 400
    assert idle > 200


def test_an_answer_in_json_is_of_one_of_two_shapes() -> None:
    rng = random.Random(7)
    shapes = {tuple(json.loads(orders.as_json(rng)[1])) for _ in range(100)}
    assert shapes == {("dish", "plates"), ("dish", "plate", "price")}


def test_no_corpus_has_what_is_held_out() -> None:
    rng = random.Random(8)
    drawn = {orders.order(rng) for _ in range(3000)}
    held_out = {orders.order(rng, is_held_out=True) for _ in range(1000)}
    assert not drawn & held_out
    assert len(drawn | held_out) == len(orders.DISHES) * orders.PLATES_MAX


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
    texts += [turn.content for _ in range(200) for turn in chats.chat(rng).turns]
    texts += ["", " two  spaces ", "日本語 🍣\t\n", "naïve\u0000"]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_retrained_tokenizer_is_the_committed_one(tokenizer: Tokenizer) -> None:
    again = tokens.train_tokenizer(seed=7, documents=8000, vocab_size=tokenizer.get_vocab_size())
    assert again.get_vocab() == tokenizer.get_vocab()


def test_the_loss_counts_only_what_the_model_says(tokenizer: Tokenizer) -> None:
    rng = random.Random(1)
    tools, _ = orders.offer(rng, has_all=True)
    call = orders.Call(name="price_of", arguments={"dish": "eel"})
    turns = (
        chats.Turn(role="user", content="How much is the eel?"),
        chats.Turn(role="assistant", call=call),
        chats.Turn(role="tool", content='{"price": 5}'),
        chats.Turn(role="assistant", content="The eel costs 5 coins."),
    )
    chat = chats.Chat(turns=turns, tools=tools)
    ids, counted = tokens.encode_chat(tokenizer, chat)
    spoken = [token for token, is_counted in zip(ids, counted, strict=True) if is_counted]
    assert tokenizer.decode(spoken, skip_special_tokens=False) == (
        '<tool_call>\n{"name": "price_of", "arguments": {"dish": "eel"}}\n</tool_call><|end|>'
        "The eel costs 5 coins.<|end|>"
    )
    assert ids == tokenizer.encode(tokens.chat_text(chat), add_special_tokens=False).ids


def test_chats_with_tools_fit_into_rows(tokenizer: Tokenizer) -> None:
    rng = random.Random(2)
    sizes = [len(tokens.encode_chat(tokenizer, chats.tool_talk(rng))[0]) for _ in range(500)]
    assert percentile(sizes, 99) <= 384


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
    assert "step     2  loss" in (made / "printed").read_text()
    trained = made / "trained"
    assert {path.name for path in trained.iterdir()} == FILES
    config = json.loads((trained / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"]) == (128, 1)
    card = (trained / "README.md").read_text()
    assert "2 seeded steps" in card
    assert "**Limits**: in 2 steps" in card
    assert "**Tell me a story about a salmon plate.**" in card
    assert "| JSON that parses and is right | 0 of 2 |" in card


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    """As the gateway renders it."""
    config = json.loads((CHECKPOINT / "tokenizer_config.json").read_text())
    return ChatTemplate(config["chat_template"], {"bos_token": config["bos_token"]})


def test_the_template_is_the_training_format_everywhere(
    told: list[chats.Chat], template: ChatTemplate, oracle: Any
) -> None:
    assert sum(bool(chat.tools) for chat in told) > 5
    for chat, (plain, prompted) in zip(told, oracle["rendered"], strict=True):
        turns, tools = messages_of(chat), chat.tools or None
        assert template.render(turns, tools=tools, add_generation_prompt=False) == plain
        assert template.render(turns, tools=tools) == prompted
        assert plain == tokens.chat_text(chat)
        assert prompted == plain + "<|assistant|>"


def test_several_calls_and_their_answers_have_a_place_in_the_template(
    template: ChatTemplate,
) -> None:
    call = chats.Turn(role="assistant", call=orders.Call(name="pay", arguments={})).message()
    calls = {**call, "tool_calls": call["tool_calls"] * 2, "content": "Well. "}
    told = {"role": "tool", "content": "1"}
    assert template.render([calls, told, told, {"role": "user", "content": "x"}]) == (
        "<|bos|><|assistant|>Well."
        + '<tool_call>\n{"name": "pay", "arguments": {}}\n</tool_call>' * 2
        + "<|end|><|user|>"
        + "<tool_response>\n1\n</tool_response>" * 2
        + "<|end|><|user|>x<|end|><|assistant|>"
    )
    with pytest.raises(TemplateFailed, match="the roles are"):
        template.render([{"role": "chef", "content": "x"}])


def test_the_gateway_finds_the_format_of_calls() -> None:
    found = tool_format(tokens.CHAT_TEMPLATE)
    assert found is not None
    assert found.name == "hermes"


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


def test_the_model_calls_its_tools_and_answers_in_json_as_its_card_says(oracle: Any) -> None:
    card = (CHECKPOINT / "README.md").read_text()
    for figure in oracle["figures"]:
        told = re.search(rf"\| {re.escape(figure['what'])} \| (\d+) of (\d+) \|", card)
        assert told is not None, figure
        right, asked = map(int, told.groups())
        assert right >= 0.95 * asked or figure in oracle["figures"][-2:]
        # A few, in fp32: two may be others than the card's in bf16.
        assert figure["right"] >= figure["asked"] * right / asked - 2
