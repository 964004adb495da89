"""The container engine of this machine, by its command line: docker or podman."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ENGINES: Final = ("docker", "podman")
# What automake calls a test that could not run: neither green nor red.
SKIPPED: Final = 77
ANSWER_S: Final = 60
# Reads the compose file for podman; docker has a plugin of its own.
PODMAN_COMPOSE: Final = "podman-compose>=1.6,<2"


class EngineError(Exception):
    """A sentence for whoever runs this: what was asked of the engine, and what it said."""


@dataclass(frozen=True, slots=True)
class Engine:
    """`program` is docker or podman."""

    program: str

    def __call__(self, *words: str, is_checked: bool = True, timeout_s: float = ANSWER_S) -> str:
        """What it prints. EngineError with its complaint, unless nobody minds."""
        done = subprocess.run(
            [self.program, *words],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if is_checked and done.returncode:
            raise EngineError(f"{self.program} {' '.join(words)}: {done.stderr.strip()[-2000:]}")
        return done.stdout

    def version(self) -> str:
        """With its name."""
        return self("--version").strip()

    def is_healthy(self, container: str) -> bool:
        """By the container's own health check, run now."""
        if self.program == "podman":
            # Its timers are systemd's, which need not be there.
            words = ["podman", "healthcheck", "run", container]
            return not subprocess.run(
                words, capture_output=True, timeout=ANSWER_S, check=False
            ).returncode
        told = self("inspect", "--format", "{{.State.Health.Status}}", container)
        return told.strip() == "healthy"

    def has_image(self, name: str) -> bool:
        return bool(self("images", "--quiet", name).strip())

    def image_bytes(self, name: str) -> int:
        return int(self("image", "inspect", "--format", "{{.Size}}", name))

    def in_image(self, name: str, *command: str) -> str:
        """What a command says in a container as closed as the compose file's."""
        closed = ["--rm", "--network=none", "--read-only", "--cap-drop=ALL"]
        return self("run", *closed, "--entrypoint", command[0], name, *command[1:])

    def compose_words(self) -> list[str]:
        """The command that reads a compose file. EngineError: there is none."""
        if self.program == "docker":
            self("compose", "version")
            return ["docker", "compose"]
        if found := shutil.which("podman-compose"):
            return [found]
        uv = Path(sys.executable).with_name("uv")
        return [str(uv), "tool", "run", "--quiet", PODMAN_COMPOSE]


def find(wanted: str | None = None) -> Engine:
    """The first that answers. EngineError says of each why it does not."""
    reasons = []
    for program in [wanted] if wanted else ENGINES:
        if not shutil.which(program):
            reasons.append(f"{program}: not installed")
            continue
        try:
            Engine(program)("info")
        except (EngineError, subprocess.TimeoutExpired) as error:
            # A client without its daemon, it may be.
            reasons.append(str(error))
        else:
            return Engine(program)
    raise EngineError("no container engine here: " + "; ".join(reasons))


class Project:
    """The compose file of this checkout, under a name of its own."""

    def __init__(
        self, engine: Engine, name: str, folder: Path, environment: Mapping[str, str]
    ) -> None:
        self.engine = engine
        self.name = name
        self._folder = folder
        self._environment = dict(environment)
        self._compose = engine.compose_words()

    def compose(self, *words: str, timeout_s: float = 600) -> str:
        """EngineError with all it said."""
        done = subprocess.run(
            [*self._compose, "-p", self.name, *words],
            cwd=self._folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if done.returncode:
            raise EngineError(f"compose {' '.join(words)}: {done.stdout.strip()[-3000:]}")
        return done.stdout

    def containers(self, service: str = "") -> list[str]:
        """Names of those that are there, running or not, in the order of their numbers."""
        label = "com.docker.compose"
        wanted = [f"--filter=label={label}.project={self.name}"]
        if service:
            wanted.append(f"--filter=label={label}.service={service}")
        names = self.engine("ps", "--all", *wanted, "--format", "{{.Names}}").split()
        return sorted(names, key=lambda name: (len(name), name))

    def log(self, container: str, *words: str) -> str:
        """What it has said, on both its streams."""
        done = subprocess.run(
            [self.engine.program, "logs", *words, container],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=ANSWER_S,
            check=False,
        )
        return done.stdout

    def logs(self, lines: int = 40) -> str:
        """The last of each container."""
        tail = ("--tail", str(lines))
        return "\n".join(f"== {name}\n{self.log(name, *tail)}" for name in self.containers())

    def down(self) -> None:
        """With its volumes: the project is a test's."""
        self.compose("down", "--volumes")
        if left := self.containers():
            # podman-compose forgets those that a scale has added, and what they depend on.
            more = ["--depend", "--ignore"] if self.engine.program == "podman" else []
            self.engine("rm", "--force", *more, *left)
            self.compose("down", "--volumes")


def run_or_exit(
    main: Callable[[Sequence[str] | None], None], words: Sequence[str] | None = None
) -> None:
    """Run a command's `main(words)`; what the engine refuses is a sentence, not a trace."""
    try:
        main(words)
    except EngineError as error:
        sys.exit(str(error))
