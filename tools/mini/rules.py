"""The productions of the grammar: symbol -> the texts it may become.

`{name}` stands for another symbol or for a word bound for the whole document (see grammar.py);
`[a|b]` is a choice written in place. A capital, as in `{Dish}`, capitalises what comes out.
A text that is listed twice is twice as likely.
"""

from typing import Final

PLACES: Final[dict[str, tuple[str, ...]]] = {
    "when": (
        "In the morning", "At noon", "In the evening", "Late at night", "On a rainy day",
        "On a bright spring day", "On a cold winter night", "After school", "After work",
    ),
    "mood": ("happy", "hungry", "tired", "shy", "curious", "quiet"),
    "drink": ("green tea", "cold water", "hot tea", "plum juice"),
    "said": ("said", "answered", "whispered"),
}  # fmt: skip

SENTENCES: Final[dict[str, tuple[str, ...]]] = {
    "chef_line": (
        "The chef [cuts|slices] the {dish} with a [long|thin|sharp] knife.",
        "The chef washes the rice [three times|with cold water] and lets it rest.",
        "The chef [smiles|nods|bows] when a new guest sits down.",
        "The chef puts the {dish} on {a_plate} plate.",
        "The chef works [quickly|slowly|quietly], and no grain of rice is lost.",
        "The chef knows every guest by name.",
        "The chef never waits for the whole table, and every plate leaves when it is ready.",
        "The chef tastes the soup and adds a little salt.",
        "The chef gets up before the sun and walks to the fish market.",
        "The chef has [two|four|five] sharp knives and one old apron.",
        "The chef listens to the belt and hears when it turns too slowly.",
        "The chef says that good rice needs time and warm hands.",
        "The chef learned the work from {Chef_name}, who learned it from the sea.",
    ),
    "belt_line": (
        "The belt turns slowly around the room.",
        "The belt carries {dish} on {plate} plates.",
        "The belt never stops while a guest is hungry.",
        "The belt passes every seat once in [two|three|four] minutes.",
        "The belt makes a soft sound, like rain on a roof.",
        "The belt brings the {dish} first and the {other} after it.",
        "The belt is long, and there is room for many plates.",
        "The belt does not ask who was first, it only keeps moving.",
    ),
    "seat_line": (
        "A seat is free for a moment only.",
        "When one guest leaves, the next guest sits down at once.",
        "There are eight seats at the counter.",
        "Every seat has a cup, a towel and a view of the belt.",
        "The seat by the window is the favourite of {guest}.",
        "A full counter is a happy counter.",
        "No seat stays empty while somebody waits at the door.",
    ),
    "dish_line": (
        "{Dish} is {taste}.",
        "{Dish} is {kind}, and it comes on {a_plate} plate.",
        "{A_plate} plate costs {price}.",
        "The {dish} is [fresh|best] [today|in the morning|this week].",
        "Many guests take the {dish} first and the {other} later.",
        "{Guest} likes {dish}, and {friend} likes {other}.",
    ),
    "end_line": (
        "At night the lamps go out and the belt rests.",
        "Then the last plate comes home and the kitchen is quiet.",
        "Tomorrow the belt will turn again.",
        "The door closes, and the street smells of rice and rain.",
        "Nobody leaves hungry.",
    ),
}

THINGS: Final = ("a small lamp", "a paper crane", "a blue bell", "a tiny flag", "a wooden fish")

STORY: Final[dict[str, tuple[str, ...]]] = {
    "arrive": (
        "{When}, {guest} opened the door of the little restaurant.",
        "{When}, {guest} came to the belt for the first time.",
        "Once there was a {mood} guest named {guest}.",
        "Once upon a time, a {mood} guest named {guest} found a small restaurant by the sea.",
        "{Guest} had never seen a moving belt before.",
        "{When}, the restaurant was full, and {guest} waited at the door.",
    ),
    "sit": (
        "A seat became free, and {guest} sat down at once.",
        "{Chef_name} bowed and pointed to the seat by the window.",
        "There was one free seat between the window and the wall.",
        "{Guest} took the last seat and poured a cup of {drink}.",
        "The seat was still warm from the guest before.",
    ),
    "meet": (
        "At the next seat sat {friend}, who was {mood} too.",
        "{Friend}, an old friend, was already there with a cup of {drink}.",
        "Next to the window sat {friend} and waited for the {other}.",
        "A {mood} guest named {friend} moved a little to the side.",
    ),
    "look": (
        "The belt carried {other}, then {third}, then {other} again.",
        "Plates in white, green and gold went by like little boats.",
        "The rice was warm, and the whole room smelled of the sea.",
        "Behind the counter {chef_name} sharpened a long knife.",
        "{Guest} counted the plates and forgot the number.",
        "The lamp above the counter was [small|round|bright], and the cups were full.",
    ),
    "wish": (
        "{Guest} wanted only one thing, the {dish} on the {plate} plate.",
        "Then {a_dish} plate came around the corner, {plate} and shining.",
        "\"I would like the {dish},\" {guest} {said}.",
        "Far away, on the other side of the belt, {guest} saw the {dish}.",
        "The {dish} plate was the most beautiful of them all.",
    ),
    "bite": (
        "{Guest} took the {plate} plate and tasted the {dish}.",
        "The {dish} was {taste}, just as {chef_name} had promised.",
        "The first bite of {dish} was {taste}, and {guest} closed both eyes.",
        "{Guest} ate slowly, because the {dish} was {taste}.",
    ),
    "talk": (
        "\"The belt brings what you need,\" {chef_name} {said}.",
        "\"Is it always this good?\" asked {friend}. \"Always,\" {said} {chef_name}.",
        "\"Take your time,\" {said} {chef_name}, \"the belt will come around again.\"",
        "{Friend} laughed and took a plate of {other}.",
        "{Chef_name} gave them {thing} and a cup of {drink}.",
        "They talked about the sea, the rain and the price of {other}.",
    ),
    "leave": (
        "When {guest} stood up, the next guest sat down at once.",
        "{Guest} paid {price}, bowed, and gave the seat to a {mood} child.",
        "The empty plate went home to the kitchen, and a new guest took the seat.",
        "{Guest} left early, {friend} stayed long, and the belt served them both.",
    ),
    "close": (
        "That night {guest} dreamed of the {dish}.",
        "And the belt turned and turned, as it always does.",
        "From that day on, {guest} came back every week.",
        "And {chef_name} smiled, because no seat had been empty.",
        "Since then there is {a_dish} plate on the belt for {guest} every evening.",
    ),
}  # fmt: skip

# What goes wrong, how it is mended, what was learned: these three belong together.
PLOTS: Final[tuple[tuple[str, str, str], ...]] = (
    (
        "But the belt stopped, and all the plates stood still. Nobody knew what to do.",
        "{Guest} looked under the counter and found {thing} between the wheels. {Chef_name} pulled "
        "it out, and the belt began to move again.",
        "Even a small thing can stop a long belt.",
    ),
    (
        "But the {dish} plate was too far away, and {friend} was hungry too.",
        "So they shared the {dish}, one bite for {guest} and one bite for {friend}.",
        "A shared plate is never too small.",
    ),
    (
        "But a cat jumped on the belt and rode past the seats like a king.",
        "{Guest} held out a little {dish}, and the cat stepped down to eat it.",
        "Every rider leaves the belt when the time is right.",
    ),
    (
        "But there was no rice left in the kitchen, and the guests grew {mood}.",
        "{Guest} ran through the rain to the market and came back with a heavy bag of rice.",
        "A kitchen needs many hands.",
    ),
    (
        "But a big group sat down, and all of them wanted to wait until the slowest had finished.",
        "{Chef_name} told them the rule of the house, and each guest left with an empty plate.",
        "Nobody should wait for the slowest.",
    ),
    (
        "But the light went out, and the room was dark.",
        "{Friend} lit a candle, and in the soft light the {dish} looked like gold.",
        "A good meal does not need much light.",
    ),
    (
        "But {guest} could not choose, and every plate looked better than the one before.",
        '"Close your eyes and take the next one," said {chef_name}, and it was the {dish}.',
        "Sometimes the belt chooses for you.",
    ),
    (
        "But two guests reached for the same {plate} plate, and neither let go.",
        "{Chef_name} cut the {dish} in two, and both of them had to laugh.",
        "Half a plate and a new friend are more than one plate.",
    ),
    (
        "But under the plate lay a letter, and nobody knew who had written it.",
        '{Guest} read it aloud. It said only this: "The next plate is for you."',
        "A small kindness travels all around the belt.",
    ),
    (
        "But the new cook dropped the {dish}, and the kitchen was silent.",
        '{Chef_name} picked up the plate, gave the cook a sharp knife, and said, "Again."',
        "Every chef has dropped a plate.",
    ),
)

RECIPE_START: Final = (
    "Wash the rice three times and let it rest.",
    "Cook the rice and cool it with a paper fan.",
)
RECIPE_END: Final = (
    "Press a little rice into a small pillow.",
    "Lay the {dish} on the rice.",
    "Serve it on {a_plate} plate.",
)
RECIPE_STEPS: Final[dict[str, tuple[str, ...]]] = {
    "slice": (
        "Keep the {dish} cold until the last moment.",
        "Slice the {dish} thin with a sharp knife.",
    ),
    "grill": (
        "Brush the {dish} with sweet sauce.",
        "Grill the {dish} over a small fire until it shines.",
    ),
    "boil": (
        "Boil the {dish} in salt water for [two|three|four] minutes.",
        "Cool the {dish} in a bowl of ice.",
    ),
    "fold": (
        "Warm the {dish} in a flat pan.",
        "Fold the {dish} over and over until it is thick.",
    ),
}
