"""Each line of `kaiten doctor`: well and unwell, with a fix exactly when it is unwell."""

import json
import socket
from pathlib import Path

import pytest

from kaiten.cli import doctor, packages
from kaiten.local.store import StoreProgram

NEW = StoreProgram(path=Path("/bin/valkey-server"), version=(9, 1))
OLD = StoreProgram(path=Path("/usr/bin/redis-server"), version=(7, 0))

H200 = "NVIDIA H200, 143771 MiB, 570.86.15"


def none_found(_name: str) -> str | None:
    return None


def only_clang(name: str) -> str | None:
    return "/usr/bin/clang" if name == "clang" else None


RATES = {
    "path": "compiled for avx2",
    "dtype": "bf16",
    "threads": 2,
    "read_gb_s": 47.0,
    "products_gflop_s": 870.0,
    "steps": [{"rows": 16, "floor_ms": 4.0, "timed_ms": 5.0}],
}
CASES = {
    "bench: machine": (
        doctor.check_rates(RATES)[0],
        "ok",
        "reads 47 GB/s, multiplies 870 GFLOP/s in bf16: 2 threads, compiled for avx2",
    ),
    "bench: steps": (
        doctor.check_rates(RATES)[1],
        "ok",
        "5.00 ms a step, 0.80 of what the machine allows: 3,200 tokens/s at most",
    ),
    "bench: no model": (doctor.check_rates("config.json: no")[0], "fail", "config.json: no"),
    "python new": (doctor.check_python((3, 11, 0)), "ok", "3.11.0"),
    "python old": (doctor.check_python((3, 10, 9)), "fail", "3.10.9"),
    "packages": (doctor.check_packages("client", ("grpcio", "rich")), "ok", "grpcio, rich"),
    "client packages missing": (
        doctor.check_packages("client", ("grpcio", "no-such-package")),
        "fail",
        "missing: no-such-package",
    ),
    "role packages missing": (
        doctor.check_packages("worker", ("no-such-package",)),
        "warn",
        "missing: no-such-package",
    ),
    "store": (doctor.check_store([OLD, NEW]), "ok", "valkey-server 9.1"),
    "store too old": (doctor.check_store([OLD]), "warn", "redis-server 7.0"),
    "no store": (doctor.check_store([]), "warn", "no Valkey or Redis"),
    "kernels": (
        doctor.check_kernels("prebuilt for avx2\nthe best"),
        "ok",
        "prebuilt for avx2: the best",
    ),
    "what kernels promise": (
        doctor.check_kernels("compiled for neon\ntimed here\na text is the same"),
        "ok",
        "compiled for neon: timed here; a text is the same",
    ),
    "kernels of torch": (
        doctor.check_kernels("torch path: no C++ compiler\n\nnot promised: that"),
        "warn",
        "torch path: no C++ compiler; not promised: that",
    ),
    "kernels without torch": (doctor.check_kernels(None), "ok", "not tried"),
    "compiler": (doctor.check_compiler(only_clang, has_headers=True), "ok", "/usr/bin/clang"),
    "no compiler": (
        doctor.check_compiler(none_found, has_headers=True),
        "warn",
        "no C compiler: Triton",
    ),
    "no headers": (doctor.check_compiler(only_clang, has_headers=False), "warn", "no Python.h"),
    "cpu": (doctor.check_cpu(frozenset({"avx2", "sse"})), "ok", "avx2"),
    "no gpu": (doctor.check_gpu((), "2.13.0+cpu", has_triton=False), "ok", "none"),
    "no gpu for a CUDA build": (
        doctor.check_gpu((), "2.13.0", has_triton=True),
        "warn",
        "none that nvidia-smi shows, but torch 2.13.0 is built for GPUs",
    ),
    "gpu": (doctor.check_gpu((H200,), "2.13.0", has_triton=True), "ok", "H200"),
    "torch without CUDA": (
        doctor.check_gpu((H200,), "2.13.0+cpu", has_triton=True),
        "warn",
        "torch 2.13.0+cpu is blind",
    ),
    "no triton": (doctor.check_gpu((H200,), "2.13.0", has_triton=False), "warn", "no triton"),
    "no driver": (doctor.check_gpu("no driver", "", has_triton=True), "warn", "no driver"),
    "no model": (doctor.check_model(Path("/no/such")), "warn", "is missing"),
    "disk": (doctor.check_disk(10**10), "ok", "10.0 GB"),
    "disk full": (doctor.check_disk(10**8), "warn", "0.1 GB"),
}


@pytest.mark.parametrize("case", CASES)
def test_lines(case: str) -> None:
    finding, status, said = CASES[case]
    assert finding.status == status
    assert said in finding.text
    assert bool(finding.fix) == (status != "ok")


def test_a_taken_port_names_its_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        finding = doctor.check_port("127.0.0.1", port, "--http-port")
    assert (finding.status, finding.name) == ("warn", f"port {port}")
    assert "--http-port" in finding.fix
    assert doctor.check_port("127.0.0.1", port, "--http-port").status == "ok"


def test_the_roles_list_only_packages_of_their_extra() -> None:
    """doctor must not promise that an extra brings what it does not bring."""
    import tomllib

    table = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())["project"]
    extras = table["optional-dependencies"]

    def brought(names: list[str]) -> set[str]:
        found: set[str] = set()
        for name in names:
            if name.startswith("kaiten["):
                for extra in name[len("kaiten[") : -1].split(","):
                    found |= brought(extras[extra])
            else:
                found.add(name.split(">")[0].split("=")[0])
        return found

    for role, needed in packages.PACKAGES.items():
        names = [] if role == "client" else extras[role]
        assert set(needed) <= {"kaiten", *brought([*table["dependencies"], *names])}, role


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (f"echo '{H200}'; echo '{H200}'", 2 * ("NVIDIA H200, 143771 MiB, driver 570.86.15",)),
        ("echo 'no driver is loaded'; exit 9", "no driver is loaded"),
        ("exit 3", "exit code 3"),
    ],
)
def test_gpus_are_those_of_the_drivers_tool(
    script: str, told: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert doctor.gpus() == told


def test_run_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(grpc_port=0, http_port=0, as_json=True) == 0
    findings = json.loads(capsys.readouterr().out)
    assert {"name", "status", "text", "fix"} == findings[0].keys()
    assert [each["name"] for each in findings].count("gpu") == 1


def test_run_ends_well_on_this_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        doctor, "kernels", lambda: "prebuilt for generic\nno AVX2, so torch multiplies"
    )
    assert doctor.run(grpc_port=0, http_port=0) == 0
    shown = capsys.readouterr().out
    assert all(f"packages: {role}" in shown for role in doctor.ROLES)
    assert "no AVX2" in shown


def test_kernels_are_tried_as_a_worker_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor, "TRY_KERNELS", "import kernels; print('compiled for', kernels.__version__)"
    )
    assert doctor.kernels() == "compiled for 0.0.0"
    monkeypatch.setattr(doctor, "TRY_KERNELS", "raise SystemExit('no such thing')")
    assert doctor.kernels() == "they cannot be tried: no such thing"


def test_what_the_kernels_do_not_promise_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    never_built = doctor.TRY_KERNELS.replace("native.build()", "native.disable('torch path')")
    monkeypatch.setattr(doctor, "TRY_KERNELS", never_built)
    finding = doctor.check_kernels(doctor.kernels())
    assert finding.status == "warn"
    assert finding.text.startswith("torch path; not promised: that a text computed again")


def test_a_gpu_needs_what_launches_its_kernels() -> None:
    findings = doctor.check_gpus((H200,), "2.13.0", has_triton=True)
    assert [finding.name for finding in findings] == ["gpu", "compiler"]
    assert len(doctor.check_gpus((), "2.13.0+cpu", has_triton=True)) == 1
