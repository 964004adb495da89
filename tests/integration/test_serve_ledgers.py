"""A whole `kaiten serve` is killed and started again: what it had accepted goes on.

That another model of that name has another ledger: tests/unit/kaiten/local/test_ledger_folders.py.
"""

from pathlib import Path

from kaiten.client import Client
from tests.support.served import Served

REQUEST_ID = "accepted-before"


def test_a_request_is_resumed_by_the_next_start(tmp_path: Path) -> None:
    """Killed in mid-stream."""
    asked = {"max_tokens": 400, "ignore_eos": True, "temperature": 0.0}
    with Served(tmp_path) as served, Client(served.address, resume_s=0.1) as client:
        whole = client.complete("Once upon a time", **asked)  # type: ignore[arg-type]
        running = client.generate(
            "Once upon a time",
            request_id=REQUEST_ID,
            # Killing the rest takes a moment, in which the gateway may see us leave.
            keep_running=True,
            **asked,  # type: ignore[arg-type]
        )
        next(running)
        served.process.kill()
    with Served(tmp_path) as served, Client(served.address) as client:
        assert client.attach(REQUEST_ID).result.choices == whole.choices
        assert served.stop() == 0
    assert len(list(tmp_path.glob("store-*"))) == 1
