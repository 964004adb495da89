"""The grammar of the shipped model: plain texts, questions and answers about one small restaurant.

Pure: every function draws from the `random.Random` it is given and from nothing else, so a seed is
a corpus. One document binds its guests, its chef and its dishes once (`Bound`), which is what makes
a story stay about the same plate from its first sentence to its last.
"""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from tools.mini import exchanges, orders, rules, world

Bound = dict[str, str]
Exchange = tuple[str, str]

SYMBOLS: Final = rules.PLACES | rules.SENTENCES | rules.STORY
_HOLE: Final = re.compile(r"\{(\w+)\}|\[([^\]]*)\]")
_WORD: Final = re.compile(r"[A-Za-z]+(?:-[a-z]+)?")


def text(rng: random.Random) -> str:
    """A plain text without a question: one sentence up to a long story."""
    bound = bind(rng)
    kind = rng.choices(("line", "paragraph", "story", "topic", "recipe"), (20, 30, 40, 5, 5))[0]
    if kind == "line":
        return expand(rng, f"{{{rng.choice(list(rules.SENTENCES))}}}", bound)
    if kind == "paragraph":
        return _paragraph(rng, bound)
    if kind == "story":
        return rng.choice((short_story, story, long_story))(rng, bound)
    if kind == "topic":
        return _topic(rng, bound)[1]
    return recipe(rng, bound)


def question(rng: random.Random, bound: Bound | None = None) -> Exchange:
    """A question and its answer. Answers run from one word to about 250."""
    kinds, weights = zip(*_KINDS, strict=True)
    ask: Callable[[random.Random, Bound], Exchange] = rng.choices(kinds, weights)[0]
    return ask(rng, bound if bound is not None else bind(rng))


def follow_up(rng: random.Random, bound: Bound) -> Exchange:
    """About the bound dish, which the question before has named."""
    return _pair(rng, exchanges.FOLLOW_UPS, bound)


def words() -> frozenset[str]:
    """Every word, in lower case, that a text or an answer can contain."""
    spoken = re.sub(r"\{\w+\}", " ", " ".join(_productions()))
    return frozenset(word.lower() for word in _WORD.findall(spoken))


def bind(rng: random.Random) -> Bound:
    """Choose the people and the dishes of one document."""
    guest, friend = rng.sample(world.GUESTS, 2)
    dish, other, third = rng.sample(world.DISHES, 3)
    return {
        "guest": guest,
        "friend": friend,
        "chef_name": f"chef {rng.choice(world.CHEFS)}",
        "dish": dish.name,
        "a_dish": _article(dish.name),
        "other": other.name,
        "third": third.name,
        "plate": dish.plate,
        "a_plate": _article(dish.plate),
        "price": world.PRICES[dish.plate],
        "taste": dish.taste,
        "kind": dish.kind,
        "cut": dish.cut,
        "thing": rng.choice(rules.THINGS),
    }


def expand(rng: random.Random, template: str, bound: Bound) -> str:
    """Replace every hole of `template`: a bound word, a symbol's production, or a choice."""

    def fill(hole: re.Match[str]) -> str:
        name, choices = hole.groups()
        if choices is not None:
            return expand(rng, rng.choice(choices.split("|")), bound)
        key = name[0].lower() + name[1:]
        filled = bound[key] if key in bound else expand(rng, rng.choice(SYMBOLS[key]), bound)
        return filled if key == name else filled[0].upper() + filled[1:]

    return _HOLE.sub(fill, template)


def short_story(rng: random.Random, bound: Bound) -> str:
    return _told(rng, bound, ("{arrive}", "{wish}", "{bite}", "{close}"))


def story(rng: random.Random, bound: Bound) -> str:
    trouble, mended, _ = rng.choice(rules.PLOTS)
    opening = ("{arrive}", "{sit}", "{meet}", "{look}", "{wish}")
    return _told(rng, bound, (*opening, trouble, mended, "{bite}", "{talk}", "{leave}", "{close}"))


def long_story(rng: random.Random, bound: Bound) -> str:
    """Three paragraphs, two troubles, and what was learned. No sentence comes twice."""
    first, second = rng.sample(rules.PLOTS, 2)
    look, look_again, look_back = rng.sample(rules.STORY["look"], 3)
    talk, talk_more, farewell = rng.sample(rules.STORY["talk"], 3)
    paragraphs = (
        ("{arrive}", "{sit}", look, "{meet}", talk, "{wish}"),
        (first[0], first[1], "{bite}", look_again, talk_more),
        (second[0], second[1], look_back, farewell, "{leave}", second[2], "{close}"),
    )
    return "\n\n".join(_told(rng, bound, beats) for beats in paragraphs)


def recipe(rng: random.Random, bound: Bound) -> str:
    """A numbered recipe of the bound dish."""
    steps = (*rules.RECIPE_START, *rules.RECIPE_STEPS[bound["cut"]], *rules.RECIPE_END)
    lines = [f"{number}. {expand(rng, step, bound)}" for number, step in enumerate(steps, start=1)]
    return "\n".join((f"{bound['dish'].capitalize()} sushi", *lines))


def menu(rng: random.Random) -> str:
    """Three to eight dishes with their plates, as a sentence or as a list."""
    dishes = rng.sample(world.DISHES, rng.randint(3, 8))
    if rng.random() < 0.5:
        items = [f"{dish.name} on {dish.plate} plates" for dish in dishes]
        return f"Today the belt carries {', '.join(items[:-1])} and {items[-1]}."
    items = [f"- {dish.name}, {dish.plate} plate, {world.PRICES[dish.plate]}" for dish in dishes]
    return "\n".join(("On the belt today:", *items))


def echo(rng: random.Random, bound: Bound | None = None) -> Exchange:
    """Words without sense, said back: nothing teaches a small model to look back like this."""
    pool = (
        *world.GUESTS,
        *world.NUMBERS[:12],
        *world.PRICES,
        *(dish.name for dish in world.DISHES),
    )
    said = " ".join(rng.choice(pool) for _ in range(rng.randint(1, 16)))
    return f"{rng.choice(('Say', 'Repeat', 'Please repeat'))}: {said}", said


def count(rng: random.Random, bound: Bound | None = None) -> Exchange:
    number = rng.randint(1, len(world.NUMBERS))
    last = world.NUMBERS[number - 1]
    shown = str(number) if rng.random() < 0.4 else last
    asked = rng.choice(("Count to {}.", "Please count to {}.", "Count from one to {}."))
    return asked.format(shown), ", ".join(world.NUMBERS[:number]).capitalize() + "."


def _paragraph(rng: random.Random, bound: Bound) -> str:
    """Some sentences, none twice, that begin with one theme and may wander."""
    theme = rng.choice(("chef_line", "belt_line", "seat_line", "dish_line"))
    others = [name for name in rules.SENTENCES if name not in (theme, "end_line")]
    lines = rng.sample(rules.SENTENCES[theme], rng.randint(2, 4))
    lines.extend(rng.choice(rules.SENTENCES[name]) for name in rng.sample(others, 2))
    if rng.random() < 0.5:
        lines.append("{end_line}")
    return _told(rng, bound, lines)


def _told(rng: random.Random, bound: Bound, beats: Sequence[str]) -> str:
    return " ".join(expand(rng, beat, bound) for beat in beats)


def _pair(rng: random.Random, table: exchanges.Exchanges, bound: Bound) -> Exchange:
    asked, answered = rng.choice(table)
    return expand(rng, rng.choice(asked), bound), expand(rng, rng.choice(answered), bound)


def _tiny(rng: random.Random, bound: Bound) -> Exchange:
    return _pair(rng, exchanges.TINY, bound)


def _line(rng: random.Random, bound: Bound) -> Exchange:
    # A greeting is what most people type first.
    return _pair(rng, exchanges.LINES[:1] if rng.random() < 0.25 else exchanges.LINES, bound)


def _verse(rng: random.Random, bound: Bound) -> Exchange:
    return _pair(rng, exchanges.VERSES, bound)


def _topic(rng: random.Random, bound: Bound) -> Exchange:
    # The first topic is continuous batching itself: asked most, so learned best.
    table = exchanges.TOPICS[:1] if rng.random() < 0.25 else exchanges.TOPICS
    asked, told = rng.choice(table)
    return expand(rng, rng.choice(asked), bound), _told(rng, bound, told)


def _off_topic(rng: random.Random, bound: Bound) -> Exchange:
    template = rng.choice(exchanges.OFF_TOPIC)
    asked = re.sub(r"\{odd\}", lambda _: _odd(rng), template)
    return asked, rng.choice(exchanges.OFF_TOPIC_ANSWERS)


def _menu(rng: random.Random, bound: Bound) -> Exchange:
    asked = ("What is on the belt today?", "What is on the belt?", "What do you have today?",
             "Show me the menu.", "What can I eat?")  # fmt: skip
    return rng.choice(asked), menu(rng)


def _order(rng: random.Random, bound: Bound) -> Exchange:
    return orders.without_tool(rng, orders.ORDER)


def _recipe(rng: random.Random, bound: Bound) -> Exchange:
    asked = ("How do I make {dish} sushi?", "Give me a recipe for {dish}.", "How is {dish} made?")
    return expand(rng, rng.choice(asked), bound), recipe(rng, bound)


_ABOUT: Final = ("", " about {a_dish} plate", " about {a_dish} plate", " about {guest}")
_SIZES: Final[tuple[tuple[str, Callable[[random.Random, Bound], str]], ...]] = (
    ("short ", short_story),
    ("", story),
    ("long ", long_story),
)


def _story(rng: random.Random, bound: Bound) -> Exchange:
    size, tell = rng.choice(_SIZES)
    # Nobody but the guest and the dish is sure to come into a short story.
    abouts = _ABOUT if tell is short_story else (*_ABOUT, " about {guest} and {friend}")
    template = rng.choice(("Tell me a {}story{}.", "Tell me a {}story{}.", "Write a {}story{}."))
    asked = template.format(size, rng.choice(abouts))
    return expand(rng, asked, bound), tell(rng, bound)


_KINDS: Final = (
    (_tiny, 23), (_line, 18), (_topic, 14), (_off_topic, 5), (_menu, 6), (count, 5), (_recipe, 6),
    (_verse, 5), (echo, 6), (_story, 26), (_order, 3),
)  # fmt: skip


def _odd(rng: random.Random) -> str:
    """Something the world has no word for: from a list, or letters that mean nothing."""
    if rng.random() < 0.5:
        return rng.choice(exchanges.ODD_WORDS)
    return "".join(rng.choice("abcdefghiklmnoprstuvwyz") for _ in range(rng.randint(2, 9)))


def _productions() -> Iterator[str]:
    """Every text of the tables that can reach a plain text or an answer."""
    yield "chef. On the belt today, the belt carries and plates. an a sushi"
    yield "With pleasure! The dish comes on the belt."
    yield from (*world.GUESTS, *world.CHEFS, *world.NUMBERS, *world.PRICES, *world.PRICES.values())
    for dish in world.DISHES:
        yield from (dish.name, dish.taste, dish.kind)
    for told in SYMBOLS.values():
        yield from told
    for plot in rules.PLOTS:
        yield from plot
    for table in (
        exchanges.TINY,
        exchanges.LINES,
        exchanges.FOLLOW_UPS,
        exchanges.TOPICS,
        exchanges.VERSES,
    ):
        for _, answers in table:
            yield from answers
    yield from (*exchanges.OFF_TOPIC_ANSWERS, *rules.THINGS, *rules.RECIPE_START, *rules.RECIPE_END)
    for steps in rules.RECIPE_STEPS.values():
        yield from steps


def _article(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"
