"""`kaiten` is the only name put into site-packages: others have a `kernels` or a `gateway` too.

The services' packages lie below `kaiten/services` there; `kaiten.local.services` runs them.
"""

from pathlib import Path

from setuptools import find_namespace_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel

SERVICES = ("gateway", "gpu_worker", "kernels", "ledger", "scheduler_svc", "service_kit")
found = find_namespace_packages(include=[*SERVICES, *(f"{name}.*" for name in SERVICES)])
HAS_BINARIES = any(Path(__file__).parent.glob("kernels/cpp/prebuilt/*.so"))


class Wheel(bdist_wheel):
    """Of any Python; with binaries inside (`make wheel`) of one platform."""

    def get_tag(self) -> tuple[str, str, str]:
        self.root_is_pure = not HAS_BINARIES
        python, abi, platform = super().get_tag()
        return ("py3", "none", platform) if HAS_BINARIES else (python, abi, platform)


setup(
    cmdclass={"bdist_wheel": Wheel},
    packages=[
        *find_namespace_packages(include=["kaiten", "kaiten.*"]),
        *(f"kaiten.services.{name}" for name in found),
    ],
    package_dir={f"kaiten.services.{name}": name for name in SERVICES},
)
