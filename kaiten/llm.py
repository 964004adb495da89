"""A model for a script or a notebook: `LLM(model).generate(prompts)`, with a stack of its own."""

import asyncio
import os
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import fields
from functools import partial
from threading import Thread
from types import TracebackType
from typing import Any, Final, Self, TypeVar, Unpack

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kaiten.cli import packages
from kaiten.cli.display import TerminalDisplay
from kaiten.cli.keygen import mint
from kaiten.client.aio import AsyncClient
from kaiten.client.errors import InvalidRequestError, UnavailableError
from kaiten.client.request import GenerateOptions, Input
from kaiten.client.results import Completion
from kaiten.console import console
from kaiten.local import model_source
from kaiten.local.background import BackgroundStack, temporary_folder
from kaiten.local.part_options import GatewayOptions, WorkerOptions
from kaiten.local.stack import ServeOptions
from kaiten.local.supervisor import RESTART_S_MAX
from kaiten.loop_thread import LoopThread

T = TypeVar("T")
Conversation = Sequence[Mapping[str, str]]
OPTIONS: Final = tuple(each.name for each in fields(WorkerOptions))


class LLM:
    """A store, a scheduler, workers and a gateway, which end with this object or its program.

        with LLM("Qwen/Qwen3-0.6B") as llm:
            for answer in llm.generate(["The chef", "A bowl of soup"], max_tokens=32):
                print(answer.text)

    What dies is started again, and what was asked goes on. Its ports are on loopback, and want a
    key that only this object has.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        revision: str | None = None,
        workers: int = 1,
        progress: bool = True,
        **worker: Any,
    ) -> None:
        """`model`: a folder or a hub id; None: the shipped one. `progress`: say on stderr how it
        goes. `worker`: `dtype`, `device`, `context_tokens`, `slots` and the others of `kaiten serve
        --help` under Workers. StartError: it cannot start, and why; TypeError: an unknown option.
        """
        if unknown := sorted(set(worker) - set(OPTIONS)):
            raise TypeError(f"LLM has no option {unknown[0]!r}; it has {', '.join(OPTIONS)}")
        packages.require("serve")
        source = model_source.resolve(None if model is None else os.fspath(model), None, revision)
        self._has_progress = progress and console().is_terminal
        display = self._display = _Display()
        if not progress:
            display.be_quiet()
        with ExitStack() as opened:
            folder = opened.enter_context(temporary_folder())
            key, entry = mint("llm")
            keys = folder / "keys.toml"
            keys.write_text(entry)
            options = ServeOptions(
                model=source,
                data_dir=folder,
                grpc_port=0,
                http_port=0,
                workers=workers,
                worker=WorkerOptions(**worker),
                gateway=GatewayOptions(api_keys_file=keys),
            )
            with display:
                self._stack = opened.enter_context(BackgroundStack(options, display))
            opened.callback(display.be_quiet)
            loop = self._stack.loop
            client = loop.call(_client(self._stack.stack.private_address, key))
            opened.callback(lambda: loop.call(client.close()))
            self._client = client
            self._end = weakref.finalize(self, _end, opened.pop_all(), loop, os.getpid())
        self.model: Final = source.name

    def __repr__(self) -> str:
        return f"LLM({self.model!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop everything. Again is fine."""
        self._end()

    def generate(
        self, prompts: str | Iterable[str | Sequence[int]], **options: Unpack[GenerateOptions]
    ) -> list[Completion]:
        """Continue each prompt, a text or token ids; their outputs, in their order.

        `options` are those of `kaiten.client.Client.generate`: `max_tokens`, `temperature`, `seed`,
        `n`, `logprobs` and so on. ApiError: one of them breaks a rule, or a part of the stack dies
        again and again; the others are cancelled.
        """
        return self._complete([prompts] if isinstance(prompts, str) else prompts, options)

    def chat(
        self,
        conversations: Conversation | Iterable[Conversation],
        **options: Unpack[GenerateOptions],
    ) -> list[Completion]:
        """Answer each conversation, a list of messages with `role` and `content`; as `generate`."""
        given: Any = conversations
        asked = [given] if isinstance(given, str) else list(given)
        if asked and isinstance(asked[0], Mapping):
            asked = [asked]
        for talk in asked:
            if not (talk and all(isinstance(message, Mapping) for message in talk)):
                rule = "a conversation must be messages, each with role and content"
                raise InvalidRequestError(f"{rule}, got {talk!r:.80}", fields=("conversations",))
        return self._complete(asked, options)

    def _complete(self, prompts: Iterable[Input], options: GenerateOptions) -> list[Completion]:
        asked = list(prompts)
        with _progress(len(asked)) if self._has_progress else nullcontext() as count:
            complete = partial(self._client.complete_all, asked, on_done=count, **options)
            return self._stack.loop.call(self._display.unless_hopeless(complete))


class _Display(TerminalDisplay):
    """Tells those who wait for answers, too, of a part that does not stay alive."""

    def __init__(self) -> None:
        super().__init__()
        # Why each of them waits in vain; empty: they need not.
        self._asking: dict[asyncio.Task[Any], str] = {}

    def died(self, name: str, why: str, restart_s: float) -> None:
        super().died(name, why, restart_s)
        if restart_s < RESTART_S_MAX:
            return
        for task in self._asking:
            self._asking[task] = f"{name} dies again and again: {why}"
            task.cancel()

    async def unless_hopeless(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """UnavailableError: meanwhile a part has died so often that its restarts are far apart."""
        task = asyncio.current_task()
        assert task is not None
        self._asking[task] = ""
        try:
            return await work()
        except asyncio.CancelledError:
            if why := self._asking[task]:
                raise UnavailableError(why) from None
            raise
        finally:
            del self._asking[task]


@contextmanager
def _progress(total: int) -> Iterator[Callable[[Completion], None]]:
    """A bar on stderr; what counts one more."""
    with Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeRemainingColumn(),
        console=console(is_unfailing=True),
    ) as bar:
        task, tokens = bar.add_task("", total=total, tokens=0), 0

        def count(completion: Completion) -> None:
            nonlocal tokens
            tokens += completion.usage.output_tokens
            bar.update(task, advance=1, tokens=tokens)

        yield count


def _end(opened: ExitStack, loop: LoopThread, pid: int) -> None:
    """Of `pid`: a fork of the program that ends, or forgets its LLM, ends nothing."""
    if os.getpid() != pid:
        return
    if loop.is_current:
        # Who collects garbage there would wait for itself.
        Thread(target=opened.close, name="kaiten-end").start()
    else:
        opened.close()


async def _client(address: str, key: str) -> AsyncClient:
    """Made in the loop it is used in."""
    return AsyncClient(address, api_key=key)
