"""The facts of the shipped model's world: one kaiten-zushi restaurant, the same in every sentence.

Everything the model can know is in these tables. A fact has one place here, so the model meets it
with one value only and can learn it.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Dish:
    """One dish of the house. `plate` is a key of PRICES; `tools` are what its recipe needs."""

    name: str
    plate: str
    taste: str
    kind: str
    cut: str


PRICES: Final = {
    "white": "one coin",
    "green": "two coins",
    "blue": "three coins",
    "red": "four coins",
    "gold": "five coins",
}

DISHES: Final = (
    Dish(name="salmon", plate="red", taste="soft and rich", kind="an orange fish", cut="slice"),
    Dish(name="tuna", plate="gold", taste="deep and clean", kind="a large fish", cut="slice"),
    Dish(name="eel", plate="gold", taste="sweet and smoky", kind="a long river fish", cut="grill"),
    Dish(
        name="shrimp",
        plate="blue",
        taste="sweet and firm",
        kind="a small pink guest of the sea",
        cut="boil",
    ),
    Dish(name="squid", plate="green", taste="mild and tender", kind="a pale swimmer", cut="slice"),
    Dish(
        name="octopus",
        plate="blue",
        taste="firm and salty",
        kind="a clever swimmer with eight arms",
        cut="boil",
    ),
    Dish(name="egg", plate="white", taste="light and sweet", kind="a warm yellow roll", cut="fold"),
    Dish(
        name="mackerel", plate="green", taste="strong and fresh", kind="a silver fish", cut="grill"
    ),
    Dish(
        name="scallop",
        plate="red",
        taste="sweet and tender",
        kind="a round shell fish",
        cut="slice",
    ),
    Dish(
        name="crab",
        plate="red",
        taste="sweet and salty",
        kind="a walker of the sea floor",
        cut="boil",
    ),
    Dish(
        name="cucumber",
        plate="white",
        taste="cool and crisp",
        kind="a green garden roll",
        cut="slice",
    ),
    Dish(
        name="tofu",
        plate="white",
        taste="quiet and soft",
        kind="a white cake of beans",
        cut="slice",
    ),
)

GUESTS: Final = ("Mika", "Ken", "Yuki", "Hana", "Taro", "Aiko", "Ben", "Lina", "Omar", "Sofia")
CHEFS: Final = ("Sato", "Mori", "Ito", "Kato")
NUMBERS: Final = (
    "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
    "nineteen", "twenty", "twenty-one", "twenty-two", "twenty-three", "twenty-four", "twenty-five",
    "twenty-six", "twenty-seven", "twenty-eight", "twenty-nine", "thirty",
)  # fmt: skip
