"""White space between tokens of JSON that a grammar lets in."""

from typing import Final

# A blank, or a line's beginning. Without end, models that were not made for it would end in it.
A_LITTLE_SPACE: Final = r"( |\n[ \t]{0,40})?"
