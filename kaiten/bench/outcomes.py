"""What came back, and when. All times are seconds since the start of the run."""

from collections.abc import Callable
from dataclasses import dataclass

OnTokens = Callable[[int], None]


class AskError(Exception):
    """A request failed; `kind` groups it with its like in the report."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One message of a stream that brought new tokens."""

    at_s: float
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What the server counted; 0 where it does not say."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One request's story.

    Latencies count from `due_s`, when the schedule wanted it sent, not from `sent_s`: a server
    that holds the client up is charged for it. `error` is a kind, empty when all went well.
    """

    index: int
    due_s: float
    sent_s: float
    done_s: float
    frames: tuple[Frame, ...]
    prompt_tokens: int
    output_tokens: int
    output_tokens_asked: int
    cached_tokens: int = 0
    error: str = ""
    detail: str = ""

    def __post_init__(self) -> None:
        assert self.due_s <= self.sent_s <= self.done_s

    @property
    def is_ok(self) -> bool:
        return not self.error

    @property
    def ttft_s(self) -> float:
        """Due to first token; only when there was one."""
        return self.frames[0].at_s - self.due_s

    @property
    def latency_s(self) -> float:
        return self.done_s - self.due_s

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first; 0 when there was no more than one."""
        later = self.output_tokens - 1
        return (self.frames[-1].at_s - self.frames[0].at_s) / later if later > 0 else 0.0
