"""docker-compose.yml on the engine of this machine: up, serve, scale, kill every container, down.

    python -m tools.containers.compose_test [--engine podman] [--streams 16] [--tokens 600]
        [--paths native,torch] [--stories deaths,observability] [--no-build] [--save]
        [-- words of tools.containers.images]

`deaths`: streams are read once undisturbed and once for each container that is killed under them;
no text may change. `gap_s`: the longest that any stream waited for its next token while a container
was killed and started again, the engine's own time included. `observability`: see `observed`. Red
prints the containers' logs. Without an engine the exit code is 77.
"""

import argparse
import asyncio
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, TypeAlias

from benchmarks.recording import record
from tools.containers import images, observed
from tools.containers.engine import SKIPPED, Engine, EngineError, find, run_or_exit
from tools.containers.stack import NATIVE, StackTest

SERVICES: Final = ("valkey", "scheduler", "worker", "gateway")
# Of a probe, in a container that serves.
PROBE_CPU_MS_MAX: Final = 150

Story: TypeAlias = Callable[[StackTest], Coroutine[Any, Any, dict[str, Any]]]


async def deaths(test: StackTest) -> dict[str, Any]:
    """From `up` to just before `down`; figures. EngineError: what went wrong."""
    first_token_s = await test.up()
    test.undisturbed = await test.streams.read()
    project = test.project
    alone = [await test.kill(project.containers(service)[0]) for service in SERVICES]
    await test.scale("worker", 2)
    await test.scale("scheduler", 2)
    grown = [await test.kill(name) for name in project.containers("worker")]
    grown.append({**await test.kill(test.leader()), "was": "leader"})
    (standby,) = {*project.containers("scheduler")} - {test.leader()}
    grown.append({**await test.kill(standby), "was": "standby"})
    grown += [await test.kill(project.containers(name)[0]) for name in ("valkey", "gateway")]
    probes = test.probes_ms()
    figures = {
        "first_token_s": first_token_s,
        "streams": len(test.streams),
        "undisturbed_gap_s": test.undisturbed.gap_s,
        "one_of_each": alone,
        "two_workers_two_schedulers": grown,
        "probe_cpu_ms": probes,
        "memory_mb": test.memory_mb(),
    }
    if changed := [each for each in (*alone, *grown) if each["changed"]]:
        raise EngineError(f"texts changed: {changed}; {figures}")
    if dear := {name: ms for name, ms in probes.items() if ms > PROBE_CPU_MS_MAX}:
        raise EngineError(f"health checks take more than {PROBE_CPU_MS_MAX} ms of CPU: {dear}")
    return figures


# With the settings that each wants besides.
STORIES: Final[Mapping[str, tuple[Story, Mapping[str, str]]]] = {
    "deaths": (deaths, {}),
    "observability": (observed.observability, observed.SETTINGS),
}


def run(engine: Engine, name: str, path: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """One story by one path of the CPU kernels; the project is gone afterwards."""
    story, settings = STORIES[name]
    test = StackTest(engine, path, chosen, settings)
    test.project.down()  # What an interrupted run has left.
    try:
        return asyncio.run(story(test))
    except BaseException:
        print(test.project.logs(), file=sys.stderr)
        raise
    finally:
        test.project.down()
        if left := test.project.containers():
            print(f"`down` left {left}", file=sys.stderr)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", help="docker or podman; default: the first that answers")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--paths", default=",".join(NATIVE), help="of the deaths")
    parser.add_argument("--stories", default=",".join(STORIES))
    parser.add_argument("--no-build", action="store_true", help="the images are there")
    parser.add_argument("--save", action="store_true", help="append to benchmarks/results")
    parser.add_argument("words", nargs="*", help="after --: for tools.containers.images")
    chosen = parser.parse_args(words)
    try:
        engine = find(chosen.engine)
    except EngineError as error:
        print(f"skipped, no container was started: {error}")
        sys.exit(SKIPPED)
    if not chosen.no_build:
        images.main(["--engine", engine.program, *chosen.words])
    for name in chosen.stories.split(","):
        for path in chosen.paths.split(",") if name == "deaths" else ["native"]:
            figures = run(engine, name, path, chosen)
            found = {"engine": engine.version(), "story": name, "path": path, **figures}
            record("compose", found, save=chosen.save)


if __name__ == "__main__":
    run_or_exit(main)
