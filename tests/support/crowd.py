"""More requests than a stack has room for, for as long as somebody looks at them."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event
from types import TracebackType
from typing import Self

from kaiten.client import Client
from tests.support.whole_stack import WholeStack, wait_until

WAITING = 60
LOOK_S = 0.1


class Crowd:
    """Whoever ends is followed by another, so no machine is too fast or too slow for a look."""

    def __init__(self, stack: WholeStack) -> None:
        self.ids: list[str] = []
        self._stack = stack
        self._client = Client(stack.door.grpc)
        self._is_closed = Event()
        self._thread = ThreadPoolExecutor(1)

    def __enter__(self) -> Self:
        self._fill()
        self._following = self._thread.submit(self._follow)
        return self

    def close(self) -> None:
        """Nobody else comes."""
        self._is_closed.set()
        self._following.result()

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        with self._client as client, self._thread:
            self.close()
            for id in self.ids:
                client.cancel(id)
        wait_until(lambda: not self._stack.problem(), "nobody is left")

    def _follow(self) -> None:
        while not self._is_closed.wait(LOOK_S):
            self._fill()

    def _fill(self) -> None:
        for _ in range(WAITING - self._stack.state().waiting):
            self.ids.append(self._ask(len(self.ids)))

    def _ask(self, i: int) -> str:
        """Few tokens and many, after prompts that begin alike."""
        return self._client.submit(
            "The chef has a plate of salmon for you, and a long story about it." * (1 + i % 3),
            max_tokens=(30 + 61 * i % 130) if i % 2 else (300 + 97 * i % 400),
            ignore_eos=True,
            temperature=0.7,
            seed=i,
        )
