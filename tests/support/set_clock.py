"""A wall clock that can be set, for one process: what it asks the C library for the time of day.

Compiled here, where there is a C compiler. The offset is in a file that both sides map.
"""

import shutil
import struct
import subprocess
from pathlib import Path

COMPILER = shutil.which("cc")
SOURCE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *offset_s;

__attribute__((constructor)) static void map_offset(void) {
  int file = open(getenv("SET_CLOCK_OFFSET"), O_RDONLY);
  offset_s = mmap(0, sizeof *offset_s, PROT_READ, MAP_SHARED, file, 0);
}

int clock_gettime(clockid_t which, struct timespec *at) {
  int failed = syscall(SYS_clock_gettime, which, at);
  if (!failed && which == CLOCK_REALTIME) at->tv_sec += *offset_s;
  return failed;
}

int gettimeofday(struct timeval *at, void *zone) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  at->tv_sec = now.tv_sec;
  at->tv_usec = now.tv_nsec / 1000;
  return 0;
}
"""


class SetClock:
    """Put `environ` into the process before it starts, and set its clock while it runs."""

    def __init__(self, folder: Path) -> None:
        assert COMPILER is not None
        folder.mkdir(parents=True, exist_ok=True)
        source, library = folder / "set_clock.c", folder / "set_clock.so"
        source.write_text(SOURCE)
        command = [COMPILER, "-shared", "-fPIC", "-O1", "-o", str(library), str(source)]
        subprocess.run(command, check=True)
        self._offset = folder / "offset"
        self._offset.write_bytes(struct.pack("q", 0))
        self.environ = {"LD_PRELOAD": str(library), "SET_CLOCK_OFFSET": str(self._offset)}

    def set(self, seconds: int) -> None:
        """So far from the true time from now on. Written in place: the file is mapped."""
        with self._offset.open("r+b") as file:
            file.write(struct.pack("q", seconds))
