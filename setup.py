"""`kaiten` is the only name put into site-packages: others have a `kernels` or a `gateway` too.

The services' packages lie below `kaiten/services` there; `kaiten.local.services` runs them.
"""

from setuptools import find_namespace_packages, setup

SERVICES = ("gateway", "gpu_worker", "kernels", "ledger", "scheduler_svc", "service_kit")
found = find_namespace_packages(include=[*SERVICES, *(f"{name}.*" for name in SERVICES)])

setup(
    packages=[
        *find_namespace_packages(include=["kaiten", "kaiten.*"]),
        *(f"kaiten.services.{name}" for name in found),
    ],
    package_dir={f"kaiten.services.{name}": name for name in SERVICES},
)
