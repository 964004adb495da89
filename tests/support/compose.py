"""docker-compose.yml rehearsed without containers: its commands, environment and health checks.

    with Rehearsal(tmp_path, {"KAITEN_WORKER_THREADS": "1"}) as rehearsal:
        rehearsal.up({"worker": 2})
        rehearsal.containers("gateway")[0].kill()

A container is a local process whose ports are replaced by free ones, names of services by loopback
addresses, and mounts by folders. What a container would start is found through PATH.
"""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import yaml

from kaiten.local.ports import HeldPort
from tests.support.store_server import server_binary
from tools.children import tied

ROOT: Final = Path(__file__).parents[2]
COMPOSE_FILE: Final = ROOT / "docker-compose.yml"
START_S: Final = 120.0
POLL_S: Final = 0.1
# Answers as `valkey-cli --user USER -e -p PORT ping` does, for machines that have no such program.
_VALKEY_CLI: Final = """
import os, socket, sys
user, port = sys.argv[2], sys.argv[5]
assert sys.argv[1:] == ["--user", user, "-e", "-p", port, "ping"], sys.argv
with socket.create_connection(("127.0.0.1", int(port)), timeout=2) as connection:
    words = f"AUTH {user} {os.environ['REDISCLI_AUTH']}"
    connection.sendall(f"{words}\\r\\nPING\\r\\nQUIT\\r\\n".encode())
    answer = b"".join(iter(lambda: connection.recv(64), b""))
    sys.exit(answer != b"+OK\\r\\n+PONG\\r\\n+OK\\r\\n")
"""
# What the file cannot be read without.
PASSWORD: Final = "rehearsed0password"
NEEDED: Final = {"KAITEN_STORE_PASSWORD": PASSWORD}
_INTERPOLATED: Final = re.compile(r"\$(?:(\$)|\{(\w+)(?::([-?])([^}]*))?\})")


def load(shell: Mapping[str, str]) -> dict[str, Any]:
    """The compose file with `${NAME:-default}` taken from the shell's environment.

    KeyError with what the file says when a value is missing that has no default.
    """

    def value_of(found: re.Match[str]) -> str:
        dollar, name, kind, rest = found.groups()
        if dollar or shell.get(name):
            return dollar or shell[name]
        if kind != "-":
            raise KeyError(f"{name}: {rest}")
        return str(rest)

    resolved = _INTERPOLATED.sub(value_of, COMPOSE_FILE.read_text(encoding="utf-8"))
    assert "${" not in resolved, "an interpolation of another form"
    composed: dict[str, Any] = yaml.safe_load(resolved)
    return composed


def seconds(duration: str) -> float:
    """`45s`, as the compose file writes every duration."""
    return float(duration.removesuffix("s"))


class Container:
    """One replica of a service. It can be started again after it has ended."""

    def __init__(self, rehearsal: "Rehearsal", service: str, index: int) -> None:
        self.name = f"{service}-{index}"
        self.service = service
        self.spec = rehearsal.services[service]
        self._held = {port: HeldPort() for port in self._container_ports()}
        self.ports = {port: str(held.number) for port, held in self._held.items()}
        self._rehearsal = rehearsal
        self._log_path = rehearsal.folder / f"{self.name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        return f"<Container {self.name} alive={self.is_alive}>"

    def address(self, port: int) -> str:
        return f"127.0.0.1:{self.ports[str(port)]}"

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def has_crashed(self) -> bool:
        """Ended, and not by `kill`."""
        return self._process is not None and not self.is_alive

    def start(self) -> None:
        assert not self.is_alive, f"{self.name} runs already"
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                tied(*self._command()),
                env=self._environment(),
                cwd=self._rehearsal.folder,
                stdout=log,
                stderr=log,
            )

    def kill(self) -> None:
        """As a crash, and wait until it is gone."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(START_S)

    def stop(self) -> int:
        """SIGTERM, and the time that compose gives it; the exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(seconds(self.spec["stop_grace_period"]))

    def remove(self) -> None:
        """End it for good."""
        self.kill()
        for held in self._held.values():
            held.close()

    def is_healthy(self) -> bool:
        """What the very health check of the file says, of one that listens: it costs a process."""
        if not all(map(_is_listening, map(int, self.ports.values()))):
            return False
        kind, *command = self.spec["healthcheck"]["test"]
        assert kind == "CMD"
        checked = subprocess.run(
            [self._translated(word) for word in command],
            env=self._environment(),
            cwd=self._rehearsal.folder,
            capture_output=True,
            timeout=START_S,
            check=False,
        )
        return checked.returncode == 0

    def log(self) -> str:
        return self._log_path.read_text(errors="replace") if self._log_path.exists() else ""

    def _container_ports(self) -> Iterator[str]:
        """The ports it is told to listen on."""
        for name, value in self.spec.get("environment", {}).items():
            if name.endswith("_PORT") and value is not None:
                yield str(value)
        command = self.spec["command"]
        if "--port" in command:
            yield command[command.index("--port") + 1]

    def _command(self) -> list[str]:
        entry = ["kaiten"] if "build" in self.spec else []
        command = [self._translated(word) for word in self.spec["command"]]
        if not entry:
            # Not ours to test: it need not listen on every interface of this machine.
            command = [word.replace("0.0.0.0", "127.0.0.1") for word in command]
        program, *words = entry + command
        found = shutil.which(program, path=self._rehearsal.base_environment["PATH"])
        assert found is not None, f"no {program} for {self.name}"
        return [found, *words]

    def _environment(self) -> dict[str, str]:
        """Of the file only, as in a container; a name without a value comes from the shell."""
        shell = self._rehearsal.shell
        environment = dict(self._rehearsal.base_environment)
        for name, value in self.spec.get("environment", {}).items():
            value = shell.get(name) if value is None else value
            if value is not None:
                environment[name] = self._translated(str(value))
        return environment

    def _translated(self, text: str) -> str:
        """A word of the file in terms of this machine."""
        if text in self.ports:
            return self.ports[text]
        for mount in self.spec.get("volumes", ()):
            if text == mount["target"] or text.startswith(f"{mount['target']}/"):
                return f"{self._rehearsal.mounted(mount)}{text.removeprefix(mount['target'])}"
        text = text.replace("/tmp/", f"{self._rehearsal.memory_of(self)}/")
        own = re.sub(r"\b127\.0\.0\.1:(\d+)", lambda found: self.address(int(found[1])), text)
        names = "|".join(self._rehearsal.services)
        return re.sub(
            rf"\b({names}):(\d+)\b",
            lambda found: self._rehearsal.addresses(found[1], int(found[2])),
            own,
        )


class Rehearsal:
    """A compose project. Leaving the block kills what is left of it."""

    def __init__(self, folder: Path, shell: Mapping[str, str]) -> None:
        self.folder = folder
        self.shell = NEEDED | dict(shell)
        self.services: dict[str, dict[str, Any]] = {
            name: spec
            for name, spec in load(self.shell)["services"].items()
            if "profiles" not in spec
        }
        self._containers: dict[str, list[Container]] = {name: [] for name in self.services}
        # The volume of compiled kernels: this machine's, where `make setup` has put them.
        kernels = Path.home() / ".cache" / "kaiten"
        kernels.mkdir(parents=True, exist_ok=True)
        (folder / ".cache").mkdir()
        (folder / ".cache" / "kaiten").symlink_to(kernels)
        self.base_environment = {
            "PATH": f"{self._programs()}:{os.environ['PATH']}",
            "HOME": str(folder),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for container in self.all():
            container.remove()

    def containers(self, service: str) -> list[Container]:
        return self._containers[service]

    def all(self) -> list[Container]:
        return [container for replicas in self._containers.values() for container in replicas]

    def addresses(self, service: str, port: int) -> str:
        """What the name of a service stands for: every replica of it."""
        return ",".join(replica.address(port) for replica in self._containers[service])

    def up(self, scale: Mapping[str, int] | None = None) -> None:
        """Create and start whatever is missing, in the order and on the conditions of the file."""
        started = []
        for name in self.start_order():
            replicas = self._containers[name]
            while len(replicas) < (scale or {}).get(name, 1):
                replicas.append(Container(self, name, len(replicas)))
            for dependency, how in self.services[name].get("depends_on", {}).items():
                assert how == {"condition": "service_healthy"}
                self.healthy(dependency)
            for replica in replicas:
                if not replica.is_alive:
                    replica.start()
                    started.append(replica)
        for replica in started:
            self.wait(replica.is_healthy, f"healthy {replica.name}")

    def healthy(self, service: str) -> None:
        """Wait until every replica is."""
        for replica in self._containers[service]:
            self.wait(replica.is_healthy, f"healthy {replica.name}")

    def down(self) -> dict[str, int]:
        """Stop everything, those first on whom nobody depends; exit codes by container."""
        return {
            container.name: container.stop()
            for name in reversed(self.start_order())
            for container in self._containers[name]
        }

    def start_order(self) -> list[str]:
        """Services, each after those it depends on."""
        order: list[str] = []
        while len(order) < len(self.services):
            ready = [
                name
                for name, spec in self.services.items()
                if name not in order and set(spec.get("depends_on", ())) <= set(order)
            ]
            assert ready, "services depend on each other in a circle"
            order += ready
        return order

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        give_up_at = time.monotonic() + START_S
        while True:
            asked_at = time.monotonic()
            if condition():
                return
            for container in self.all():
                assert not container.has_crashed, f"{container} ended: {container.log()[-3000:]}"
            assert time.monotonic() < give_up_at, f"no {what}:\n{self._logs()}"
            # A container is looked at: nothing of it says that it has changed. A health check is a
            # process, and dear.
            time.sleep(max(POLL_S, 2 * (time.monotonic() - asked_at)))

    def mounted(self, mount: Mapping[str, Any]) -> Path:
        if mount["type"] == "bind":
            source: Path = ROOT / mount["source"]
            assert source.exists(), f"{source} would be mounted and is not there"
            return source
        volume = self.folder / "volumes" / str(mount["source"])
        volume.mkdir(parents=True, exist_ok=True)
        return volume

    def memory_of(self, container: Container) -> Path:
        """Its /tmp."""
        folder = self.folder / "tmp" / container.name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _logs(self) -> str:
        return "\n".join(f"{one.name}: {one.log()[-1500:]}" for one in self.all())

    def _programs(self) -> Path:
        """What the images have on their PATH."""
        folder = self.folder / "bin"
        folder.mkdir(parents=True)
        python = shlex.quote(sys.executable)
        for name, command in {
            "kaiten": f"{python} -P -m kaiten",
            "valkey-server": shlex.quote(server_binary()),
            "valkey-cli": f"{python} -c {shlex.quote(_VALKEY_CLI)}",
        }.items():
            program = folder / name
            program.write_text(f'#!/bin/sh\nexec {command} "$@"\n', encoding="utf-8")
            program.chmod(0o755)
        return folder


def _is_listening(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2):
        return True
    return False
