"""The compiled kernels of every variant, into the package: `make wheel` ships them.

With the C++ library inside, so that a machine's own may be older. Of the C library they need what
this machine's compiler takes from it (glibc 2.34 on Debian 12); on an older one they do not load,
and a worker compiles for itself. Those that this processor can run are tried.
"""

import sys
from typing import Final

from kernels import native
from kernels.cpp import build

# libgcc is torch's need too; the static one would ask for the newest C library.
STANDALONE: Final = ("-static-libstdc++", "-Wl,--exclude-libs,ALL", "-Wl,--gc-sections", "-s")


def main() -> None:
    build.PREBUILT.mkdir(exist_ok=True)
    for stale in build.PREBUILT.iterdir():
        stale.unlink()
    runnable = {variant.name for variant in build.variants()}
    for variant in build.every():
        library = build.prebuilt(variant)
        build.compile_to(library, variant, build.find_compiler(), *STANDALONE)
        if variant.name in runnable and not native.build(variant=variant.name):
            sys.exit(native.reason())
        tried = native.reason() if variant.name in runnable else "not tried: not this processor's"
        print(f"{library.name}  {library.stat().st_size / 1e6:.2f} MB  {tried}")


if __name__ == "__main__":
    main()
