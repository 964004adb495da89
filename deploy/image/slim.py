"""Make an environment ready to be an image: `python slim.py ROLE`, by the environment's own Python.

What no service reads is taken out, the rest is compiled, as a root that is read-only never keeps
what Python compiles by itself.
"""

import compileall
import py_compile
import re
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Final

SITE: Final = Path(sysconfig.get_path("purelib"))
SCRIPTS: Final = Path(sysconfig.get_path("scripts"))
# Globs, by role; with what they would be good for.
UNUSED: Final = {
    "*": (
        "pip",  # installs; nothing is installed into an image
        "pip-*.dist-info",
        "setuptools",  # built us
        "setuptools-*.dist-info",
        "_distutils_hack",
        "distutils-precedence.pth",
        "pkg_resources",
        "fsspec/tests",
        "numpy/**/tests",
        "sympy/**/tests",
        "networkx/**/tests",
        "mpmath/tests",
        "numpy/f2py",  # compiles Fortran
        "numpy/_core/include",  # for compilers of extensions
        "torch/include",
        "torch/share",
        "torch/test",  # tests of torch's C++ half
        "torch/bin/test_*",
        "torch/bin/protoc*",
        "torch/lib/lib*_test.so",
        "torch/lib/libbackend_with_compiler.so",
        "torch/lib/*.a",
        "**/*.pyi",  # for type checkers
        "**/*.pxd",
        "**/*.pyx",
    ),
    # Faster downloads of weights: neither has any, and plain HTTP is what is left.
    "gateway": ("hf_xet", "hf_xet-*.dist-info", "kaiten/mini/checkpoint/*.safetensors"),
    "scheduler": ("kaiten/mini/checkpoint/*.safetensors",),
    "worker": (),
}
# Compiled when they are first used, if ever: half of it colours programs in a terminal.
NOT_COMPILED: Final = re.compile(r"/(pygments/(lexers|styles)|torch/testing|huggingface_hub/cli)/")


def remove(pattern: str, site: Path) -> int:
    """The bytes that are gone."""
    size = 0
    for path in sorted(site.glob(pattern)):
        inside = path.rglob("*") if path.is_dir() else [path]
        size += sum(each.lstat().st_size for each in inside if each.is_file())
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return size


def compile_all(site: Path = SITE) -> None:
    """By their text, not their time, and never looked at again: the same bytes at every build."""
    compileall.compile_dir(
        site,
        quiet=2,
        rx=NOT_COMPILED,
        workers=0,
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )


def slim(role: str, site: Path = SITE) -> None:
    """Take out what the role does not read."""
    for stale in [*site.rglob("__pycache__")]:
        shutil.rmtree(stale)
    for pattern in (*UNUSED["*"], *UNUSED[role]):
        if size := remove(pattern, site):
            print(f"{size / 1e6:8.1f} MB  {pattern}")


def main(role: str) -> None:
    slim(role)
    for script in SCRIPTS.glob("pip*"):
        script.unlink()
    compile_all()


if __name__ == "__main__":
    main(sys.argv[1])
