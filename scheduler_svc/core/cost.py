"""What a worker's steps take: fitted from those it answered, in whole numbers, so that whoever has
the journal has the fit.

    step_us = decode_us(rows that decode) + token_us * prompt tokens

What a prompt token adds to a step is a regression over the steps of late, prompts and rows apart:
as far as they differed, and what was known before as far as they did not. What a step took beyond
its prompt tokens, its rows did. Those are told apart by the number of binary digits of their count,
and between what is known of two such numbers the fit is a line.
"""

# A new step counts for an eighth of what a fit says, about: noise passes, a drift is followed.
WEIGHT_BITS = 3
# So many make a regression, about: long enough to have seen different ones.
WINDOW = 32
# And so much of what is known of more rows is drawn to the line through its own.
AGE_BITS = 6
# Of fitted sums; else small ones would round to nothing.
SCALE_BITS = 10
# Steps that differ by less, in rows or prompt tokens, squared, tell more of noise than of prices.
DOUBT = 64 << 2 * SCALE_BITS


class StepCost:
    """The fit of one worker. Nothing is known before it has answered a step of the kind."""

    def __init__(self) -> None:
        self._decode_us: dict[int, int] = {}
        self._decode_rows: dict[int, int] = {}
        self._prefill_us = 0
        self._prefill_tokens = 0
        # Of each prompt token, how long its step took beyond its rows, summed up.
        self._prefill_step_us = 0
        self._prices = _Prices()
        self._last_decodes = 0

    def observe(self, step_us: int, *, decodes: int, prompt_tokens: int) -> None:
        """A step took so long, with so many rows that decode, and prompt tokens of others."""
        if prompt_tokens:
            beyond_us = max(0, step_us - self.decode_us(decodes)) << SCALE_BITS
            if not self._prefill_tokens:
                # Until steps differ enough to tell a row from a prompt token: it is one, too.
                self._prices.row = self._prices.token = beyond_us // prompt_tokens
            self._prefill_us = _decayed(self._prefill_us) + beyond_us
            self._prefill_tokens = _decayed(self._prefill_tokens) + (prompt_tokens << SCALE_BITS)
            self._prefill_step_us = _decayed(self._prefill_step_us) + beyond_us * prompt_tokens
        if decodes:
            # One like the step before tells of no price.
            if prompt_tokens or decodes != self._last_decodes:
                self._prices.observe(step_us, decodes, prompt_tokens)
                self._age(decodes)
            self._last_decodes = decodes
            token_us = _nearest(prompt_tokens * self._prices.token, 1 << SCALE_BITS)
            self._observe_decodes(max(0, step_us - token_us), decodes)

    def _observe_decodes(self, step_us: int, decodes: int) -> None:
        digits, rows = decodes.bit_length(), decodes << SCALE_BITS
        for known, seen in ((self._decode_us, step_us), (self._decode_rows, rows)):
            known[digits] = _decayed(known.setdefault(digits, seen)) + (seen >> WEIGHT_BITS)

    def _age(self, decodes: int) -> None:
        """What is known of more rows is less and less believed: were it too long, nobody would go
        there to find out.
        """
        rows, step_us = decodes << SCALE_BITS, self.decode_us(decodes)
        for other, other_us in self._decode_us.items() if self._prices.row else ():
            if (beyond := self._decode_rows[other] - rows) > 0:
                line_us = step_us + self._prices.of_rows(beyond)
                self._decode_us[other] += line_us - other_us >> AGE_BITS

    def decode_us(self, decodes: int) -> int:
        """Of a step in which so many rows decode, and nothing else is done; by what a row adds
        where only fewer or only more are known, and 0 where none is.
        """
        if not self._decode_us or not decodes:
            return 0
        digits = self._digits(decodes)
        rows, step_us = decodes << SCALE_BITS, self._decode_us[digits]
        beyond = rows - self._decode_rows[digits]
        if beyond < 0:
            other = max([known for known in self._decode_us if known < digits], default=digits)
        else:
            other = min([known for known in self._decode_us if known > digits], default=digits)
        if other == digits:
            return max(0, step_us + self._prices.of_rows(beyond))
        slope_rows = self._decode_rows[other] - self._decode_rows[digits]
        return step_us + (self._decode_us[other] - step_us) * beyond // slope_rows

    def decodes_in(self, step_us: int, *, near: int) -> int | None:
        """How many rows may decode in a step that is to take so long, as if each took its part of
        a step of `near` rows; None: none was seen yet.

        Too few are said to fit a longer step and too many a shorter one, as no step is all rows:
        whoever goes there and asks again gets ever closer, from either side.
        """
        near_us = self.decode_us(near)
        return near * step_us // near_us if near_us else None

    def prefill_us(self, prompt_tokens: int) -> int:
        """Of so many prompt tokens, in whatever steps; 0 where none was seen yet."""
        return prompt_tokens * self._prefill_us // max(1, self._prefill_tokens)

    def prefill_us_least(self, prompt_tokens: int, step_tokens_max: int) -> int:
        """Of so many in steps that are full, as one that is takes no less than the others of late:
        a step of a few takes a worker hardly less than one of many.
        """
        steps_us = prompt_tokens * self._prefill_step_us // max(1, self._prefill_tokens)
        return steps_us // step_tokens_max

    def prompt_tokens_in(self, step_us: int, *, decodes: int) -> int | None:
        """How many fit a step that is to take so long; None: none was seen yet."""
        if not self._prefill_tokens:
            return None
        left_us = max(0, step_us - self.decode_us(decodes))
        return (left_us << SCALE_BITS) // max(1, self._prices.token)

    def _digits(self, decodes: int) -> int:
        """Under which steps of about so many rows are known, or else of fewer, or else of more."""
        known, most = self._decode_us, decodes.bit_length()
        return max([one for one in known if one <= most], default=min(known))


class _Prices:
    """What one more row and one more prompt token add to a step: a regression of two slopes, each
    drawn towards what it was before. All scaled, and what is squared twice.
    """

    def __init__(self) -> None:
        self.row = self.token = 0
        # Steps seen, up to the window; means of rows, tokens and times.
        self._count = 0
        self._mean: list[int] = []
        # Covariances: of rows, of tokens, of both, and of each with the time.
        self._rows = self._tokens = self._both = self._rows_us = self._tokens_us = 0

    def of_rows(self, rows: int) -> int:
        """What so many, scaled, take."""
        return _nearest(rows * self.row, 1 << 2 * SCALE_BITS)

    def observe(self, step_us: int, decodes: int, prompt_tokens: int) -> None:
        seen = (decodes << SCALE_BITS, prompt_tokens << SCALE_BITS, step_us << SCALE_BITS)
        self._mean = self._mean or list(seen)
        rows, tokens, us = (one - mean for one, mean in zip(seen, self._mean, strict=True))
        self._count = count = min(self._count + 1, WINDOW)
        for index, beyond in enumerate((rows, tokens, us)):
            self._mean[index] += _nearest(beyond, count)
        self._rows += _nearest(rows * rows - self._rows, count)
        self._tokens += _nearest(tokens * tokens - self._tokens, count)
        self._both += _nearest(rows * tokens - self._both, count)
        self._rows_us += _nearest(rows * us - self._rows_us, count)
        self._tokens_us += _nearest(tokens * us - self._tokens_us, count)
        doubtful_rows, doubtful_tokens = self._rows + DOUBT, self._tokens + DOUBT
        by_rows = (self._rows_us << SCALE_BITS) + DOUBT * self.row
        by_tokens = (self._tokens_us << SCALE_BITS) + DOUBT * self.token
        size = doubtful_rows * doubtful_tokens - self._both * self._both
        self.row = max(0, _nearest(by_rows * doubtful_tokens - by_tokens * self._both, size))
        self.token = max(0, _nearest(by_tokens * doubtful_rows - by_rows * self._both, size))


def _nearest(value: int, by: int) -> int:
    """Or what is rounded again and again would drift."""
    return (value + by // 2) // by


def _decayed(value: int) -> int:
    return value - (value >> WEIGHT_BITS)
