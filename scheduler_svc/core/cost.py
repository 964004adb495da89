"""What a worker's steps take: fitted from those it answered, in whole numbers, so that whoever has
the journal has the fit.

    step_us = decode_us(rows that decode) + prefill_us(prompt tokens)

Each of the two is a line from mean to mean, of the steps with about as many: counts are told apart
by the number of their binary digits. A step that had both teaches both, as most steps of a busy
worker have: by what it took longer than was thought, or shorter, both parts were wrong alike.
"""

# A new step counts for an eighth of what a fit says, about: noise passes, a drift is followed.
WEIGHT_BITS = 3
# Of fitted means; else small ones would round to nothing.
SCALE_BITS = 10
# A part that was thought to be nothing is blamed for this much of what its tokens would be: or it
# stayed nothing for ever.
DOUBT_BITS = 4


class StepCost:
    """The fit of one worker. Nothing is known before it has answered a step of the kind."""

    def __init__(self) -> None:
        self._decode, self._prefill = _Fit(from_zero=False), _Fit(from_zero=True)

    def observe(self, step_us: int, *, decodes: int, prompt_tokens: int) -> None:
        """A step took so long, with so many rows that decode, and prompt tokens of others."""
        decode_us = self._decode_part_us(step_us, decodes, prompt_tokens)
        if decodes and decode_us:
            self._decode.observe(decodes, decode_us)
        if prompt_tokens:
            self._prefill.observe(prompt_tokens, step_us - decode_us)

    def _decode_part_us(self, step_us: int, decodes: int, prompt_tokens: int) -> int:
        """What of a step its rows that decode took, by all that is known."""
        if not decodes or not prompt_tokens:
            return step_us if decodes else 0
        by_count_us = step_us * decodes // (decodes + prompt_tokens)
        if not self._prefill:
            return min(self.decode_us(decodes), step_us)
        if not self._decode:
            return by_count_us
        decode_us, prefill_us = self.decode_us(decodes), self.prefill_us(prompt_tokens)
        decode_doubt = decode_us + (by_count_us >> DOUBT_BITS)
        prefill_doubt = prefill_us + (step_us - by_count_us >> DOUBT_BITS)
        beyond_us = step_us - decode_us - prefill_us
        decode_us += beyond_us * decode_doubt // max(1, decode_doubt + prefill_doubt)
        return max(0, min(decode_us, step_us))

    def decode_us(self, decodes: int) -> int:
        """Of a step in which so many rows decode, and nothing else is done; as a step of fewer
        where only those are known, and 0 where none is.
        """
        return self._decode.at(decodes) if self._decode.near(decodes) else 0

    def decodes_in(self, step_us: int, *, near: int) -> int | None:
        """How many rows may decode in a step that is to take so long, as if each took its part of
        the steps of about `near` rows; None: none was seen yet.

        Too few are said to fit a longer step and too many a shorter one, as no step is all rows:
        whoever goes there and asks again gets ever closer, from either side.
        """
        if (mean := self._decode.near(near)) is None:
            return None
        rows, us = mean
        return rows * step_us // max(1, us)

    def prefill_us(self, prompt_tokens: int) -> int:
        """Of so many prompt tokens, in whatever steps; 0 where none was seen yet."""
        return self._prefill.at(prompt_tokens)

    def prompt_tokens_in(self, step_us: int, *, decodes: int) -> int | None:
        """How many fit a step that is to take so long; None: none was seen yet."""
        if not self._prefill:
            return None
        return self._prefill.count_in(max(0, step_us - self.decode_us(decodes)))


# How many of what is counted, and what they take; means, scaled.
Mean = tuple[int, int]


class _Fit:
    """Means by the digits of a count, and lines between them. Beyond them the last one's value, or
    where it begins at zero the last one's for each.
    """

    def __init__(self, *, from_zero: bool) -> None:
        self._from_zero = from_zero
        self._means: dict[int, Mean] = {}

    def __bool__(self) -> bool:
        return bool(self._means)

    def observe(self, count: int, us: int) -> None:
        digits, seen = count.bit_length(), (count << SCALE_BITS, us << SCALE_BITS)
        if (mean := self._means.get(digits)) is not None:
            self._means[digits] = _closer(mean[0], seen[0]), _closer(mean[1], seen[1])
        else:
            self._means = dict(sorted([*self._means.items(), (digits, seen)]))

    def near(self, count: int) -> Mean | None:
        """Of about so many, or of fewer; None: none is known."""
        most, found = count.bit_length(), None
        for digits, mean in self._means.items():
            if digits > most:
                break
            found = mean
        return found

    def at(self, count: int) -> int:
        """What so many take; 0 where nothing is known."""
        x, low = count << SCALE_BITS, (0, 0)
        for high in self._means.values():
            if high[0] >= x:
                return self._between(low, high, x) >> SCALE_BITS
            low = high
        return (low[1] * x // max(1, low[0]) if self._from_zero else low[1]) >> SCALE_BITS

    def _between(self, low: Mean, high: Mean, x: int) -> int:
        if not self._from_zero and not low[0]:
            return high[1]
        return low[1] + (high[1] - low[1]) * (x - low[0]) // (high[0] - low[0])

    def count_in(self, us: int) -> int:
        """How many take so long, at least one of them known."""
        y, low = us << SCALE_BITS, (0, 0)
        for high in self._means.values():
            if high[1] > y:
                beyond = (high[0] - low[0]) * (y - low[1]) // (high[1] - low[1])
                return low[0] + beyond >> SCALE_BITS
            low = high
        return low[0] * y // max(1, low[1]) >> SCALE_BITS


def _closer(mean: int, seen: int) -> int:
    return mean - (mean >> WEIGHT_BITS) + (seen >> WEIGHT_BITS)
