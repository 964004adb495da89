"""The two tools of the restaurant and its answers in JSON: wishes, calls, and what came of them.

    price_of(dish)           tells coins
    order(dish, plates)      plates from 1 to 9; tells minutes, or nothing
    an order as JSON         {"dish": …, "plates": …}
    a dish as JSON           {"dish": …, "plate": its colour, "price": coins}

Some pairs of a dish and a number of plates are held out: no corpus has them, so that who is asked
about them must have read the question (evaluate.py).
"""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tools.mini import exchanges, world

PRICE_OF: Final = "price_of"
ORDER: Final = "order"
PLATES_MAX: Final = 9
JSON_SYSTEM: Final = "Answer in JSON."

DISHES: Final = tuple(dish.name for dish in world.DISHES)
COINS: Final = {name: number for number, name in enumerate(world.PRICES.values(), start=1)}

_WISHES: Final = (
    "{some} of {dish}, please.", "{some} of {dish}.", "I would like {some} of {dish}.",
    "Can I have {some} of {dish}?", "May I have {some} of {dish}, please?",
    "Order {some} of {dish}.", "Please order {some} of {dish}.", "Bring me {some} of {dish}.",
    "We take {some} of {dish}.", "{count} {dish}, please.", "I want {count} {dish}.",
    "{count} {dish}.",
)  # fmt: skip
_FACTS: Final = (
    "What is {dish}?", "Tell me about {dish}.", "How much is the {dish}?",
    "Which plate is the {dish} on?", "Describe the {dish}.",
)  # fmt: skip
_AS_JSON: Final = (
    "{asked} Answer in JSON.", "{asked} Reply as JSON.", "{asked} As JSON, please.",
    "Answer in JSON: {asked}", "As JSON: {asked}",
)  # fmt: skip
_BARE_AS_JSON: Final = ("{bare} as JSON.", "Give me {bare} as JSON.", "{bare} in JSON, please.")

_DESCRIPTIONS: Final = {
    PRICE_OF: ("The price of a dish.", "What a plate of a dish costs.", "Get the price of a dish."),
    ORDER: ("Order plates of a dish.", "Order a dish.", "Bring plates of a dish to the guest."),
}
_OTHER_TOOLS: Final = ("pay", "weather", "call_chef", "book_seat", "play_music", "send_mail")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    name: str
    arguments: Mapping[str, str | int]

    def text(self) -> str:
        return json.dumps({"name": self.name, "arguments": self.arguments})


def order(rng: random.Random, *, is_held_out: bool = False) -> tuple[str, int]:
    """A dish and a number of plates."""
    while True:
        dish, plates = rng.randrange(len(DISHES)), rng.randint(1, PLATES_MAX)
        if ((dish + plates) % 6 == 0) == is_held_out:
            return DISHES[dish], plates


def wish(rng: random.Random, name: str, *, is_held_out: bool = False) -> tuple[str, Call]:
    """What a guest says, and the call of the named tool that it asks for."""
    dish, plates = order(rng, is_held_out=is_held_out)
    if name == PRICE_OF:
        asked = rng.choice(exchanges.PRICE_QUESTIONS).format(dish=dish)
        return asked, Call(name=name, arguments={"dish": dish})
    asked = _said(rng, rng.choice(_WISHES), dish, plates)
    return asked, Call(name=name, arguments={"dish": dish, "plates": plates})


def outcome(rng: random.Random, call: Call) -> tuple[str, str]:
    """What the tool told, and that in words."""
    dish, number = call.arguments["dish"], rng.randint(1, rng.choice((9, 40)))
    if rng.random() < 0.1:
        failed = rng.choice(({"error": "sold out"}, {"ok": False}))
        return json.dumps(failed), f"I am sorry, there is no {dish} today."
    if call.name == PRICE_OF:
        coins = _counted(number, "coin")
        price = rng.choice(
            ({"price": number}, {"dish": dish, "price": number}, {"coins": number}, number, coins)
        )
        told = price if isinstance(price, str) else json.dumps(price)
        return told, f"The {dish} costs {coins}."
    ordered = f"Very well: {_counted(call.arguments['plates'], 'plate')} of {dish}"
    if rng.random() < 0.5:
        done = rng.choice(({"ok": True}, {"status": "ok"}, {**call.arguments, "ok": True}, "ok"))
        return done if isinstance(done, str) else json.dumps(done), f"{ordered}."
    waited = rng.choice(({"minutes": number}, {**call.arguments, "minutes": number}))
    return json.dumps(waited), f"{ordered}, in {number} min."


def without_tool(rng: random.Random, name: str) -> tuple[str, str]:
    """The same wishes and what is said where the tool is not there."""
    dish, plates = order(rng)
    if name == PRICE_OF:
        price = world.PRICES[_plate_of(dish)]
        return rng.choice(exchanges.PRICE_QUESTIONS).format(dish=dish), f"{price.capitalize()}."
    asked = _said(rng, rng.choice(_WISHES), dish, plates)
    return asked, f"With pleasure! The {dish} comes on the belt."


def is_for_tool(answered: str) -> bool:
    """Whether this answer would be found by a tool, were it there."""
    return answered.removesuffix(".").lower() in world.PRICES.values() or (
        answered.startswith("With pleasure!")
    )


def as_json(
    rng: random.Random, *, is_wished: bool = True, is_held_out: bool = False
) -> tuple[str, str]:
    """A question with or without the wish for JSON, and the object."""
    dish, plates = order(rng, is_held_out=is_held_out)
    if rng.random() < 0.6:
        found: dict[str, str | int] = {"dish": dish, "plates": plates}
        asked, bare = rng.choice(_WISHES), "{some} of {dish}"
    else:
        plate = _plate_of(dish)
        found = {"dish": dish, "plate": plate, "price": COINS[world.PRICES[plate]]}
        asked, bare = rng.choice(_FACTS), rng.choice(("{dish}", "the {dish}"))
    if is_wished and rng.random() < 0.5:
        asked = rng.choice(_BARE_AS_JSON).replace("{bare}", bare)
        return _said(rng, asked, dish, plates), json.dumps(found)
    asked = _said(rng, asked, dish, plates)
    if is_wished:
        asked = rng.choice(_AS_JSON).format(asked=asked)
    return asked, json.dumps(found)


def offer(
    rng: random.Random, *, has_all: bool = False
) -> tuple[tuple[Mapping[str, Any], ...], tuple[str, ...]]:
    """Tools in any order, and the names of those that are the restaurant's."""
    names = [PRICE_OF, ORDER] if has_all else rng.choice(_OFFERS)
    tools = [_tool(rng, name) for name in names]
    if not tools or rng.random() < 0.15:
        tools.append(_other_tool(rng))
    rng.shuffle(tools)
    return tuple(tools), tuple(names)


_OFFERS: Final[tuple[list[str], ...]] = (
    *([[PRICE_OF, ORDER]] * 5), *([[PRICE_OF]] * 2), *([[ORDER]] * 2), [],
)  # fmt: skip


def _tool(rng: random.Random, name: str) -> Mapping[str, Any]:
    """A tool as one client or another would write it."""
    properties: dict[str, Any] = {"dish": {"type": "string"}}
    if rng.random() < 0.25:
        known = rng.choice((DISHES, tuple(rng.sample(DISHES, 4))))
        properties["dish"]["enum"] = list(known)
    if rng.random() < 0.15:
        properties["dish"]["description"] = "The name of the dish."
    if name == ORDER:
        properties["plates"] = {"type": "integer"}
        if rng.random() < 0.2:
            properties["plates"] |= {"minimum": 1, "maximum": PLATES_MAX}
    if rng.random() < 0.1:
        properties = {key: {**each, "title": key.title()} for key, each in properties.items()}
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if rng.random() < 0.8:
        parameters["required"] = list(properties)
    if rng.random() < 0.2:
        parameters["additionalProperties"] = False
    return _function(rng, name, rng.choice((*_DESCRIPTIONS[name], "")), parameters)


def _other_tool(rng: random.Random) -> Mapping[str, Any]:
    """One that no question is for."""
    parameters: dict[str, Any] = {"type": "object", "properties": {}}
    if rng.random() < 0.6:
        name = rng.choice(("city", "guests", "song", "text"))
        parameters["properties"][name] = {"type": rng.choice(("string", "integer"))}
    return _function(rng, rng.choice(_OTHER_TOOLS), "", parameters)


def _function(
    rng: random.Random, name: str, description: str, parameters: Mapping[str, Any]
) -> Mapping[str, Any]:
    function: dict[str, Any] = {"name": name}
    if description:
        function["description"] = description
    function["parameters"] = parameters
    if rng.random() < 0.1:
        function["strict"] = True
    return {"type": "function", "function": function}


def _said(rng: random.Random, template: str, dish: str, plates: int) -> str:
    """A sentence with the number in words or as digits; a plate is also one plate."""
    count = world.NUMBERS[plates - 1] if rng.random() < 0.6 else str(plates)
    some = f"{count} {'plate' if plates == 1 else 'plates'}"
    if plates == 1 and rng.random() < 0.4:
        count, some = ("an" if dish[0] in "aeiou" else "a"), "a plate"
    said = template.format(some=some, count=count, dish=dish)
    return said[0].upper() + said[1:]


def _counted(number: str | int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _plate_of(dish: str) -> str:
    return next(each.plate for each in world.DISHES if each.name == dish)
