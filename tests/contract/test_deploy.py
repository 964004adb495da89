"""The compose file and the Dockerfile keep the rules of deploy/README.md."""

import ast
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from gateway.settings import GatewaySettings
from gpu_worker.settings import WorkerSettings
from kaiten.local import store
from kaiten.mini import CHECKPOINT
from ledger import acl
from scheduler_svc.settings import SchedulerSettings
from service_kit.lifecycle import STOP_S_MAX
from service_kit.settings import Settings
from service_kit.settings import load as load_settings
from tests.support.compose import NEEDED, PASSWORD, ROOT, load, seconds
from tools import lock
from tools.containers import images

COMPOSE = load(NEEDED)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = ("gateway", "scheduler", "worker", "worker-gpu")
SETTINGS: dict[str, type[Settings]] = {
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "worker": WorkerSettings,
}
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()

every_service = pytest.mark.parametrize("name", SERVICES)
each_of_ours = pytest.mark.parametrize("name", OURS)


def role(name: str) -> str:
    return str(SERVICES[name]["build"]["args"]["ROLE"])


@every_service
def test_a_container_can_do_no_more_than_it_must(name: str) -> None:
    service = SERVICES[name]
    user, _, group = service["user"].partition(":")
    assert int(user) > 0
    assert int(group) > 0
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "cap_add" not in service
    assert "privileged" not in service
    assert service["pids_limit"] > 0


@every_service
def test_a_container_is_watched_and_restarted(name: str) -> None:
    service = SERVICES[name]
    assert service["restart"] == "unless-stopped"
    assert service["healthcheck"]["test"][0] == "CMD"
    assert seconds(service["healthcheck"]["timeout"]) >= 3
    assert {"max-size", "max-file"} <= set(service["logging"]["options"])


@every_service
def test_a_container_takes_no_more_than_its_part(name: str) -> None:
    service = SERVICES[name]
    assert size_of(service["mem_limit"]) >= 1 << 30
    assert float(service["cpus"]) >= 0
    if float(service["cpus"]) == 0:
        # All cores, but nobody who answers clients waits for it.
        assert name.startswith("worker")
        assert service["cpu_shares"] < 1024


@every_service
def test_only_loopback_is_published_and_only_at_the_edge(name: str) -> None:
    service = SERVICES[name]
    published = service.get("ports", [])
    assert all(port.startswith("127.0.0.1:") for port in published)
    assert bool(published) == ("outside" in service["networks"])
    # Names that cannot be had twice would stand against --scale.
    assert not {"container_name", "hostname", "network_mode"} & set(service)


def test_the_inner_network_leads_nowhere() -> None:
    assert COMPOSE["networks"]["inside"] == {"internal": True}
    assert all("inside" in service["networks"] for service in SERVICES.values())
    for name in ("valkey", "scheduler", "worker", "worker-gpu"):
        assert SERVICES[name]["networks"] == ["inside"]


@every_service
def test_images_are_pinned(name: str) -> None:
    service = SERVICES[name]
    if "build" not in service:
        assert re.fullmatch(r"[a-z/]+:v?\d+\.\d+\.\d+", service["image"])


@pytest.mark.parametrize(
    "dockerfile", ["Dockerfile", "valkey.Dockerfile", "observability/stand-ins.Dockerfile"]
)
def test_the_base_image_is_a_choice_with_a_pinned_default(dockerfile: str) -> None:
    text = (ROOT / "deploy" / dockerfile).read_text()
    # Our own image has what a collector needs.
    built_on = set(re.findall(r"^FROM (\S+)", text, re.M)) - {"kaiten-gateway"}
    assert built_on - set(re.findall(r"^FROM \S+ AS ([\w-]+)$", text, re.M)) == {"${BASE_IMAGE}"}
    assert f"ARG BASE_IMAGE={images.BASE}\n" in text
    assert re.fullmatch(r"[a-z/]+:\d+\.\d+\.\d+-[a-z-]+", images.BASE)


@each_of_ours
def test_stopping_takes_no_longer_than_the_grace(name: str) -> None:
    drain_s = SETTINGS[role(name)].model_fields["drain_s"].default
    assert seconds(SERVICES[name]["stop_grace_period"]) >= drain_s + STOP_S_MAX


@each_of_ours
def test_the_environment_is_understood(name: str) -> None:
    """A service refuses a variable it does not know; those without a value are the operator's."""
    environment = SERVICES[name]["environment"]
    given = {key: str(value) for key, value in environment.items() if value is not None}
    load_settings(SETTINGS[role(name)], role(name), [], given)
    fields = SETTINGS[role(name)].model_fields
    for key in environment:
        if key.startswith("KAITEN_"):
            prefix = f"KAITEN_{role(name).upper()}_"
            assert key.startswith(prefix)
            assert key.removeprefix(prefix).lower() in fields


@each_of_ours
def test_an_image_is_built_for_its_role(name: str) -> None:
    build = SERVICES[name]["build"]
    assert build["target"] == name
    # An image for GPUs is the worker's, and more.
    stage = stages()[role(name)]
    assert re.findall(r"^USER (\S+)$", stages()[name], re.M)[-1] == "10001:10001"
    assert "USER 10001:10001" in stage
    assert SERVICES[name]["user"] == "10001:10001"
    assert SERVICES[name]["command"] == [role(name)]
    assert f'CMD ["{role(name)}"]' in stage
    # The image checks itself as the compose file does.
    words = ", ".join(f'"{word}"' for word in SERVICES[name]["healthcheck"]["test"][1:])
    assert re.search(rf"HEALTHCHECK [^\n]*\\\n +CMD \[{re.escape(words)}\]", stage)


def test_an_image_installs_what_is_locked_and_only_workers_torch() -> None:
    for name, text in stages().items():
        installs = re.findall(r"pip install ([^&]+?)(?: \\)?\n", text.replace("\\\n    -r", "-r"))
        assert all(
            "--require-hashes" in each
            or "--no-deps --no-build-isolation ." in each
            or (name == "computing" and each.endswith('"$TORCH"'))
            for each in installs
        ), (name, installs)
    for stage, made_from in {"gateway": "lean", "scheduler": "lean", "worker": "computing"}.items():
        assert re.findall(r"--from=(\w+)", stages()[stage]) == [made_from]
    for name in OURS:
        has_torch = "torch" in packages(role(name)) | packages("otlp") | packages("metrics")
        assert has_torch == name.startswith("worker"), name


@pytest.mark.parametrize("name", lock.ROLES)
def test_what_an_image_installs_is_locked_within_the_ranges(name: str) -> None:
    """`make lock` was run after the last change of pyproject.toml."""
    locked = lock.locked(name)
    for requirement in lock.requirements(name):
        wanted = Requirement(requirement)
        if lock.is_by_place(lock.name_of(requirement)):
            continue
        if wanted.marker is None or wanted.marker.evaluate({"python_version": "3.11"}):
            assert locked[lock.name_of(requirement)] in wanted.specifier, requirement
    assert not any(map(lock.is_by_place, locked))
    text = (lock.LOCKS / f"{name}.txt").read_text()
    assert len(re.findall(r"^[\w.-]+==.*\n    --hash=sha256:", text, re.M)) == len(locked)


def test_no_image_but_a_gpus_has_a_compiler() -> None:
    """The kernels are compiled for every processor while the worker's image is built."""
    compiled_in, *gpu = [name for name, text in stages().items() if "apt-get" in text]
    assert (compiled_in, gpu) == ("computing", ["worker-gpu"])
    assert "-m tools.prebuilt" in stages()["computing"]


def test_an_image_says_what_it_is() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    labels = dict(re.findall(r"(org\.opencontainers\.image\.\w+)=(\S+)", stages()["service"]))
    assert f"ARG VERSION={project['version']}\n" in stages()["service"]
    assert labels["org.opencontainers.image.version"] == "$VERSION"
    assert labels["org.opencontainers.image.licenses"] == project["license"]
    for stage in ("lean", "computing"):
        assert "image/sbom.py" in stages()[stage]
        assert "image/slim.py" in stages()[stage]


def test_the_image_holds_every_package_and_the_shipped_model() -> None:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (named,) = re.findall(r"^SERVICES = (\(.+\))$", (ROOT / "setup.py").read_text(), re.M)
    wanted = {"kaiten", *ast.literal_eval(named)}
    copied = set(re.findall(r"^COPY (\w+) \1$", DOCKERFILE, re.M))
    let_in = set(re.findall(r"^!([\w.]+)$", (ROOT / ".dockerignore").read_text(), re.M))
    assert copied == wanted
    # What the package's metadata name, and the build reads.
    files = {
        "pyproject.toml",
        "setup.py",
        table["project"]["readme"],
        *table["project"]["license-files"],
    }
    assert let_in == wanted | files
    assert files <= set(DOCKERFILE.split())
    # The shipped model is served where none is mounted on /model.
    for stage in ("gateway", "worker"):
        assert f"/{CHECKPOINT.relative_to(ROOT / 'kaiten')}/* /model/" in stages()[stage]


def test_what_the_code_reads_is_installed_with_it() -> None:
    """What kernels are compiled from, too: a binary is found by the hash of all that."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = table["tool"]["setuptools"]["package-data"]["*"]
    not_read = {".py", ".md", ".yaml", ".txt"}
    packages = re.findall(r"^COPY (\w+) \1$", DOCKERFILE, re.M)
    for path in (path for package in packages for path in (ROOT / package).rglob("*.*")):
        # Beside compiled files stand half-written ones, for moments, of whoever imports them first.
        is_cache = "__pycache__" in path.parts
        if not is_cache and path.is_file() and path.suffix not in not_read:
            assert any(path.match(pattern) for pattern in patterns), path


@pytest.mark.skipif(not shutil.which("docker-compose"), reason="no docker-compose here")
def test_the_compose_command_accepts_it() -> None:
    command = ["docker-compose", "--profile", "gpu", "--profile", "observability", "config", "-q"]
    ran = subprocess.run(
        command, cwd=ROOT, env=os.environ | NEEDED, capture_output=True, timeout=60, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, b"")


@pytest.mark.skipif(not shutil.which("hadolint"), reason="no hadolint here")
def test_hadolint_has_nothing_to_say() -> None:
    command = ["hadolint", "deploy/Dockerfile"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, check=False)
    assert (ran.returncode, ran.stdout) == (0, b"")


@each_of_ours
def test_profiles_and_devices(name: str) -> None:
    service = SERVICES[name]
    assert ("profiles" in service) == ("deploy" in service) == (name == "worker-gpu")


def test_every_volume_and_mounted_file_is_there() -> None:
    volumes = [mount for service in SERVICES.values() for mount in service.get("volumes", ())]
    named = {mount["source"] for mount in volumes if mount["type"] == "volume"}
    assert named == set(COMPOSE["volumes"])
    for mount in volumes:
        if mount["type"] == "bind":
            assert mount["read_only"] is True
            assert (ROOT / mount["source"]).exists()


def test_the_store_is_told_what_the_ledger_demands() -> None:
    lines = (ROOT / "deploy" / "valkey" / "valkey.conf").read_text().splitlines()
    settings = dict(line.split(maxsplit=1) for line in lines if line and line[0] != "#")
    assert settings["appendonly"] == "yes"
    assert settings["appendfsync"] == "always"
    assert settings["maxmemory-policy"] == "noeviction"
    # Without a bound nothing is ever refused: the kernel ends the store instead.
    assert size_of(settings["maxmemory"]) > 0
    assert size_of(SERVICES["valkey"]["mem_limit"]) > 2 * size_of(settings["maxmemory"])
    program = store.StoreProgram(path=Path("valkey-server"), version=(9, 1))
    words = store.command(program, Path("data"), Path("data/sock"))
    for name in ("appendonly", "appendfsync", "maxmemory", "maxmemory-policy"):
        assert words[words.index(f"--{name}") + 1] == settings[name]


def test_the_stores_password_is_the_operators() -> None:
    """There is none to fall back on, and no command line has it."""
    with pytest.raises(KeyError, match=r"KAITEN_STORE_PASSWORD: .*\.env"):
        load({})
    for service in SERVICES.values():
        assert not any(PASSWORD in word for word in service.get("command", ()))
        assert not any(PASSWORD in word for word in service["healthcheck"]["test"])
    assert SERVICES["valkey"]["environment"] == {
        "REDISCLI_AUTH": PASSWORD,
        "KAITEN_CELL": "0",
        "ADMIN_PASSWORD": "",
    }
    for name in ("gateway", "scheduler"):
        urls = [v for k, v in SERVICES[name]["environment"].items() if k.endswith("REDIS_URL")]
        assert urls == [f"redis://kaiten:{PASSWORD}@valkey:6379/0"]


def test_the_store_starts_with_no_empty_password(tmp_path: Path) -> None:
    """It would be one like any other; `--from-literal=password=$NOTHING` makes a Secret of it."""
    users = tmp_path / "users.conf"
    words = ["sh", str(ROOT / "deploy/valkey/valkey-start.sh"), os.devnull, str(users), "true"]
    for password, is_refused in (("", True), ("a0password", False)):
        environ = os.environ | {"REDISCLI_AUTH": password, "KAITEN_CELL": "0"}
        ran = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
        assert bool(ran.returncode) is ("REDISCLI_AUTH" in ran.stderr) is is_refused, ran
    assert "user kaiten on >a0password resetkeys ~kaiten:{0}:* " in users.read_text()


def test_what_the_page_says_of_tls_is_understood() -> None:
    """Of what stands in `.env` a container is given only what the compose file names."""
    page = (ROOT / "deploy" / "README.md").read_text()
    (block,) = re.findall(r"```yaml\n(services:\n.*?)```", page, re.DOTALL)
    gateway = yaml.safe_load(block)["services"]["gateway"]
    environment = {k: v for k, v in SERVICES["gateway"]["environment"].items() if v is not None}
    given = {key: str(value) for key, value in (environment | gateway["environment"]).items()}
    chosen = load_settings(GatewaySettings, "gateway", [], given)
    mounts = [each["target"] for each in SERVICES["gateway"]["volumes"]]
    assert all(str(each.parent) in mounts for each in (chosen.tls_cert, chosen.tls_key) if each)
    assert chosen.grpc_socket is not None
    assert gateway["tmpfs"] == [f"{chosen.grpc_socket.parent}:mode=700,uid=10001,gid=10001"]
    asked = ["CMD", "kaiten", "healthcheck", f"unix:{chosen.grpc_socket}"]
    assert gateway["healthcheck"] == {"test": asked}


def test_the_stores_user_can_do_what_the_ledger_does() -> None:
    file = "deploy/valkey/valkey-commands.acl"
    assert (ROOT / file).read_text() == acl.commands_rule() + "\n", f"python -m ledger.acl > {file}"
    start = (ROOT / "deploy" / "valkey" / "valkey-start.sh").read_text()
    assert acl.keys_rule("%s") in start


@each_of_ours
def test_parts_know_each_other_by_a_credential_that_one_of_them_makes(name: str) -> None:
    environment = SERVICES[name]["environment"]
    prefix = f"KAITEN_{role(name).upper()}_PEER_CREDENTIAL"
    assert environment[f"{prefix}_FILE"] == "/peers/credential"
    (mount,) = [each for each in SERVICES[name]["volumes"] if each["target"] == "/peers"]
    is_maker = name == "scheduler"
    assert (f"{prefix}_CREATE" in environment) is is_maker
    assert mount.get("read_only", False) is not is_maker
    # Nobody looks for it before it is there.
    assert is_maker or "scheduler" in SERVICES[name]["depends_on"]
    assert "install -d -o 10001 -g 10001 -m 700 /peers" in DOCKERFILE


def test_kernels_for_a_gpu_are_compiled_where_the_container_may_write() -> None:
    service = SERVICES["worker-gpu"]
    volumes = [mount for mount in service["volumes"] if mount["type"] == "volume"]
    (volume,) = [mount for mount in volumes if mount["source"] != "peers"]
    assert service["environment"]["TRITON_CACHE_DIR"].startswith(f"{volume['target']}/")
    # What the volume takes over when it is new, owner included.
    assert f"install -d -o 10001 -g 10001 {volume['target']}" in DOCKERFILE


def size_of(text: str) -> int:
    """`1gb`, as Valkey reads it, or `2560m`, as Docker does: both by powers of two."""
    count, unit = re.fullmatch(r"(\d+)([mg])b?", text).groups()  # type: ignore[union-attr]
    return int(count) << {"m": 20, "g": 30}[unit]


def stages() -> dict[str, str]:
    """Text of each stage of the Dockerfile by its name."""
    parts = re.split(r"^FROM \S+ AS ([\w-]+)$", DOCKERFILE, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def packages(extra: str) -> set[str]:
    """Names that `kaiten[extra]` asks for, through the extras it names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = set[str]()
    for requirement in project["optional-dependencies"][extra] + project["dependencies"]:
        name, extras = re.match(r"([\w.-]+)(?:\[([\w,]+)\])?", requirement).groups()  # type: ignore[union-attr]
        found.add(name)
        if name == "kaiten":
            found |= {package for other in extras.split(",") for package in packages(other)}
    return found
