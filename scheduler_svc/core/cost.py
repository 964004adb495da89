"""What a worker's steps take: fitted from those it answered, in whole numbers, so that whoever has
the journal has the fit.

    step_us = decode_us(rows that decode) + prefill_ns * prompt tokens / 1000

Rows that decode are told apart by the number of binary digits of their count, and between what is
known of two such numbers the fit is a line.
"""

# A new step counts for an eighth of what a fit says, about: noise passes, a drift is followed.
WEIGHT_BITS = 3
# Of fitted sums; else small ones would round to nothing.
SCALE_BITS = 10


class StepCost:
    """The fit of one worker. Nothing is known before it has answered a step of the kind."""

    def __init__(self) -> None:
        self._decode_us: dict[int, int] = {}
        self._decode_rows: dict[int, int] = {}
        self._prefill_us = 0
        self._prefill_tokens = 0

    def observe(self, step_us: int, *, decodes: int, prompt_tokens: int) -> None:
        """A step took so long, with so many rows that decode, and prompt tokens of others."""
        if prompt_tokens:
            beyond_us = max(0, step_us - self.decode_us(decodes))
            self._prefill_us = _decayed(self._prefill_us) + (beyond_us << SCALE_BITS)
            self._prefill_tokens = _decayed(self._prefill_tokens) + (prompt_tokens << SCALE_BITS)
        elif decodes:
            digits, rows = decodes.bit_length(), decodes << SCALE_BITS
            before = self._decode_us.setdefault(digits, step_us)
            self._decode_us[digits] = _decayed(before) + (step_us >> WEIGHT_BITS)
            before = self._decode_rows.setdefault(digits, rows)
            self._decode_rows[digits] = _decayed(before) + (rows >> WEIGHT_BITS)

    def decode_us(self, decodes: int) -> int:
        """Of a step in which so many rows decode, and nothing else is done; as a step of fewer
        where only those are known, and 0 where none is.
        """
        if not (digits := self._digits(decodes)):
            return 0
        rows, step_us = decodes << SCALE_BITS, self._decode_us[digits]
        beyond = rows - self._decode_rows[digits]
        if beyond < 0:
            other = max([known for known in self._decode_us if known < digits], default=digits)
        else:
            other = min([known for known in self._decode_us if known > digits], default=digits)
        if other == digits:
            return step_us
        slope_rows = self._decode_rows[other] - self._decode_rows[digits]
        return step_us + (self._decode_us[other] - step_us) * beyond // slope_rows

    def decodes_in(self, step_us: int, *, near: int) -> int | None:
        """How many rows may decode in a step that is to take so long, as if each took its part of
        the steps of about `near` rows; None: none was seen yet.

        Too few are said to fit a longer step and too many a shorter one, as no step is all rows:
        whoever goes there and asks again gets ever closer, from either side.
        """
        if not (digits := self._digits(near)):
            return None
        return self._decode_rows[digits] * step_us // max(1, self._decode_us[digits]) >> SCALE_BITS

    def prefill_us(self, prompt_tokens: int) -> int:
        """Of so many prompt tokens, in whatever steps; 0 where none was seen yet."""
        return prompt_tokens * self._prefill_us // max(1, self._prefill_tokens)

    def prompt_tokens_in(self, step_us: int, *, decodes: int) -> int | None:
        """How many fit a step that is to take so long; None: none was seen yet."""
        if not self._prefill_tokens:
            return None
        left_us = max(0, step_us - self.decode_us(decodes))
        return left_us * self._prefill_tokens // max(1, self._prefill_us)

    def _digits(self, decodes: int) -> int:
        """Under which steps of about so many rows, or of fewer, are known; 0: none is."""
        known = [digits for digits in self._decode_us if digits <= decodes.bit_length()]
        return max(known, default=0)


def _decayed(value: int) -> int:
    return value - (value >> WEIGHT_BITS)
