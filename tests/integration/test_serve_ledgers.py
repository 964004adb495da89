"""Two checkpoints of one folder name under one data directory, each with its own ledger."""

import shutil
import struct
from pathlib import Path

import pytest

from kaiten.client import Client
from kaiten.client.errors import NotFoundError
from kaiten.mini import CHECKPOINT
from tests.support.served import Served

REQUEST_ID = "accepted-for-the-first"


def fine_tuned(folder: Path) -> Path:
    """The shipped model with the signs of a few of its last numbers turned."""
    shutil.copytree(CHECKPOINT, folder)
    (path,) = folder.glob("*.safetensors")
    raw = bytearray(path.read_bytes())
    (header_bytes,) = struct.unpack_from("<Q", raw)
    assert len(raw) > header_bytes + 1024
    # The last byte of a number holds its sign, in bf16 and in fp32.
    for at in range(len(raw) - 1, len(raw) - 257, -4):
        raw[at] ^= 0x80
    path.write_bytes(raw)
    return folder


def test_a_request_is_resumed_by_its_own_model_only(tmp_path: Path) -> None:
    """Killed in mid-stream; the other model knows nothing of it, the first one ends it."""
    first = tmp_path / "a" / "final"
    shutil.copytree(CHECKPOINT, first)
    second = fine_tuned(tmp_path / "b" / "final")
    data = tmp_path / "data"
    asked = "Once upon a time"
    with Served(data, str(first)) as served, Client(served.address, resume_s=0.1) as client:
        whole = client.complete(asked, max_tokens=400, ignore_eos=True, temperature=0.0)
        running = client.generate(
            asked,
            max_tokens=400,
            ignore_eos=True,
            temperature=0.0,
            request_id=REQUEST_ID,
            # Killing the rest takes a moment, in which the gateway may see us leave.
            keep_running=True,
        )
        next(running)
        served.process.kill()
    with Served(data, str(second)) as served, Client(served.address) as client:
        with pytest.raises(NotFoundError):
            client.attach(REQUEST_ID).result  # noqa: B018
        assert served.stop() == 0
    with Served(data, str(first)) as served, Client(served.address) as client:
        assert client.attach(REQUEST_ID).result.choices == whole.choices
        assert served.stop() == 0
    assert len(list(data.glob("store-final-*"))) == 2
