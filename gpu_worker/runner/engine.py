"""The compute thread: takes plans from a queue, runs their leases step by step, reports each step.

It is never the event loop's thread, so the server answers while a step runs. It alone touches the
rows and the device. One stream (`Session`) owns the batch at a time; a newer one empties it.
How the steps of a lease follow each other is `stepping`'s.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import structlog

from gpu_worker.batch.plans import InvalidPlan, Plan, StepResult
from gpu_worker.batch.rows import Rows
from gpu_worker.batch.step_types import AheadRunner, ModelRunner
from gpu_worker.runner.stepping import InTurns, OneAhead, Stepper

log = structlog.get_logger()

# While a step is in the air and no plan has come, it is looked at this often.
LOOK_S = 100e-6


class Session(Protocol):
    """A stream as the compute thread sees it. Both methods are called on that thread."""

    def on_result(self, result: StepResult) -> None: ...

    def on_opened(self) -> None:
        """The batch is empty and is this session's."""

    def on_refused(self, error: InvalidPlan) -> None:
        """The last plan was wrong; the batch is empty and the session over."""


class Profile(Protocol):
    """Listens to some steps. Called on the compute thread."""

    @property
    def is_complete(self) -> bool:
        """Whether it has heard enough."""

    def begin(self) -> bool:
        """False: nobody wants it any more."""

    def end(self) -> None: ...

    def running(self, plan: Plan) -> AbstractContextManager[None]:
        """While this plan is run."""

    def reporting(self, report: Callable[[StepResult], None]) -> Callable[[StepResult], None]:
        """What hears of each step, then calls this."""


@dataclass(frozen=True, slots=True, eq=False)
class _Open:
    session: Session


@dataclass(frozen=True, slots=True, eq=False)
class _Close:
    session: Session


@dataclass(frozen=True, slots=True, eq=False)
class _Submit:
    session: Session
    plan: Plan
    received_ns: int


@dataclass(frozen=True, slots=True, eq=False)
class _Profile:
    profile: Profile
    is_over: bool


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


_Command = _Open | _Close | _Submit | _Profile | _Stop


class Engine:
    """`on_crash` is called on the compute thread, once, if it ends by an error of its own."""

    def __init__(
        self,
        rows: Rows,
        runner: ModelRunner | AheadRunner,
        *,
        on_crash: Callable[[Exception], None],
    ) -> None:
        self._rows = rows
        self._stepper: Stepper = (
            OneAhead(rows, runner) if isinstance(runner, AheadRunner) else InTurns(rows, runner)
        )
        self._on_crash = on_crash
        self._session: Session | None = None
        self._profile: Profile | None = None
        # Since when the thread is at what it does now; 0: it waits for a command.
        self._at_it_since_ns = 0
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._first: Callable[[], None] = lambda: None
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._main, name="compute", daemon=True)

    def __repr__(self) -> str:
        return f"<Engine waiting={self.waiting_count} {self._rows!r}>"

    @property
    def waiting_count(self) -> int:
        """Plans and other commands that the running step has not seen yet."""
        return self._commands.qsize()

    @property
    def at_it_ns(self) -> int:
        """How long no step has ended while there is one; 0 when the thread waits for a command."""
        since_ns = self._at_it_since_ns
        return time.monotonic_ns() - since_ns if since_ns else 0

    def start(self, first: Callable[[], None] = lambda: None) -> Future[None]:
        """`first` runs before any command, on the compute thread; the future is its end."""
        self._first = first
        self._thread.start()
        return self._started

    def stop(self) -> None:
        """Let the running step end, then the thread."""
        self._commands.put(_Stop())
        if self._thread.is_alive():
            self._thread.join()

    def open(self, session: Session) -> None:
        """Give the batch, emptied, to this session. Answered by `on_opened`."""
        self._commands.put(_Open(session))

    def submit(self, session: Session, plan: Plan) -> None:
        """Run a plan after those submitted before. Ignored unless the session owns the batch."""
        self._commands.put(_Submit(session, plan, time.perf_counter_ns()))

    def close(self, session: Session) -> None:
        """Empty the batch if it is still this session's."""
        self._commands.put(_Close(session))

    def profile(self, profile: Profile) -> None:
        """Of the steps from now on. One at a time."""
        self._commands.put(_Profile(profile, is_over=False))

    def end_profile(self, profile: Profile) -> None:
        """With the steps it has, unless it has ended."""
        self._commands.put(_Profile(profile, is_over=True))

    def _main(self) -> None:
        if not self._started.set_running_or_notify_cancel():
            return
        try:
            self._first()
        except BaseException as error:
            self._started.set_exception(_as_exception(error))
            return
        self._started.set_result(None)
        try:
            while not isinstance(command := self._next(), _Stop):
                # With a step in the air it is at it already.
                self._at_it_since_ns = self._at_it_since_ns or time.monotonic_ns()
                self._handle(command)
        except BaseException as error:
            # First: where memory is full, what is to be logged of it may find none either.
            self._on_crash(_as_exception(error))
            log.critical("engine.crashed", reason=str(error), exc_info=error)

    def _next(self) -> _Command:
        """Wait for a command. What is in the air lands as soon as it is done.

        But it is not waited for: the plan that comes next is to be launched behind it.
        """
        while self._stepper.is_in_air:
            if self._stepper.is_down:
                self._stepper.land()
                self._end_complete_profile()
                continue
            with contextlib.suppress(queue.Empty):
                return self._commands.get(timeout=LOOK_S)
        self._at_it_since_ns = 0
        return self._commands.get()

    def _handle(self, command: _Open | _Close | _Submit | _Profile) -> None:
        if isinstance(command, _Profile):
            self._take_profile(command.profile, is_over=command.is_over)
        elif isinstance(command, _Open):
            self._own(command.session)
            command.session.on_opened()
        elif command.session is not self._session:
            return
        elif isinstance(command, _Close):
            self._own(None)
        else:
            self._execute(command)

    def _own(self, session: Session | None) -> None:
        self._stepper.clear()
        self._session = session

    def _execute(self, command: _Submit) -> None:
        session, profile, plan = command.session, self._profile, command.plan

        def reported(result: StepResult) -> None:
            self._at_it_since_ns = time.monotonic_ns()
            session.on_result(result)

        report = reported if profile is None else profile.reporting(reported)
        try:
            with contextlib.nullcontext() if profile is None else profile.running(plan):
                self._stepper.run(plan, command.received_ns, report, self._is_anything_waiting)
        except InvalidPlan as error:
            self._own(None)
            session.on_refused(error)
        except Exception as error:
            error.add_note(f"while plan {plan.plan_id} was run")
            raise
        self._end_complete_profile()

    def _take_profile(self, profile: Profile, *, is_over: bool) -> None:
        if is_over and profile is self._profile:
            self._profile = None
            profile.end()
        elif not is_over:
            assert self._profile is None, "one at a time"
            self._profile = profile if profile.begin() else None

    def _end_complete_profile(self) -> None:
        if self._profile is not None and self._profile.is_complete:
            self._take_profile(self._profile, is_over=True)

    def _is_anything_waiting(self) -> bool:
        return not self._commands.empty()


def _as_exception(error: BaseException) -> Exception:
    """A library's panic is none, and who hears of it is to hear of it as of any other."""
    if isinstance(error, Exception):
        return error
    crash = RuntimeError(f"{type(error).__name__}: {error}")
    crash.__cause__ = error
    return crash
