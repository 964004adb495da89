"""What only its user reaches: folders, and the sockets by which the parts of a stack talk."""

import os
import shutil
import tempfile
from os import fsencode
from pathlib import Path
from typing import Final
from urllib.parse import quote

from kaiten.start_error import StartError

# sun_path holds 108 bytes with its terminator.
SOCKET_PATH_BYTES_MAX: Final = 100
# worker-9999.sock
NAME_BYTES_MAX: Final = 16


def private_folder(path: Path) -> Path:
    """Made when it is missing; closed when somebody made it open. StartError: it cannot be."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.chmod(0o700)
    except OSError as error:
        raise StartError(
            f"{path} cannot be a folder of this user's alone: {error.strerror}",
            "move away what is there, or choose another folder with --data-dir",
        ) from error
    return path


def socket_folder(path: Path) -> Path:
    """For socket files: that folder, or another in private when its name is too long, or has a
    comma, by which gRPC ends names."""
    is_short = len(fsencode(path)) + 1 + NAME_BYTES_MAX <= SOCKET_PATH_BYTES_MAX
    if is_short and "," not in str(path):
        return private_folder(path)
    return Path(tempfile.mkdtemp(prefix="kaiten-"))


def remove_own(folder: Path, pid: int) -> None:
    """With what is in it, by the process that made it: a fork of it leaves the same blocks."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


def unix_address(path: Path) -> str:
    """As gRPC reads it."""
    return "unix:" + quote(str(path))
