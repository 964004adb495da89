"""The compiled kernels of every variant, into the package: `make wheel` ships them.

    python -m tools.prebuilt
    python -m tools.prebuilt --machine aarch64 --compiler aarch64-linux-gnu-g++

With the C++ library inside, so that a machine's own may be older. Of the C library they need what
this machine's compiler takes from it (glibc 2.34 on Debian 12); on an older one they do not load,
and a worker compiles for itself. Those that this processor can run are tried.
"""

import argparse
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kernels import native
from kernels.cpp import build

MACHINES: Final = ("x86_64", "aarch64")
# libgcc is torch's need too; the static one would ask for the newest C library.
STANDALONE: Final = ("-static-libstdc++", "-Wl,--exclude-libs,ALL", "-Wl,--gc-sections", "-s")


def write(folder: Path, variant: build.Variant, compiler: str) -> Path:
    """A variant's library, by a compiler for its machine. RuntimeError: it failed."""
    library = folder / build.prebuilt(variant).name
    build.compile_to(library, variant, compiler, *STANDALONE)
    return library


def main(argv: Sequence[str] | None = None) -> None:
    here = platform.machine()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--machine", default=here, choices=MACHINES, help="default: this one's")
    parser.add_argument("--compiler", default=None, help="a C++ compiler for that machine")
    asked = parser.parse_args(argv)
    if asked.machine != here and asked.compiler is None:
        parser.error(f"--machine {asked.machine} needs a --compiler for it")
    build.PREBUILT.mkdir(exist_ok=True)
    for stale in build.PREBUILT.iterdir():
        stale.unlink()
    compiler = asked.compiler or build.find_compiler()
    runnable = {v.name for v in build.variants()} if asked.machine == here else set()
    for variant in build.every(asked.machine):
        try:
            library = write(build.PREBUILT, variant, compiler)
        except (OSError, RuntimeError) as error:
            sys.exit(f"{compiler} makes nothing for {asked.machine}: {error}")
        if variant.name in runnable and not native.build(variant=variant.name):
            sys.exit(native.reason())
        tried = native.reason() if variant.name in runnable else "not tried: not this processor's"
        print(f"{library.name}  {library.stat().st_size / 1e6:.2f} MB  {tried}")


if __name__ == "__main__":
    main()
