"""`kaiten ps`, `kaiten trace` and `kaiten top` of a running stack; `top` in a real terminal."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kaiten.cli.app import main
from kaiten.client import Client
from tests.support.whole_stack import WholeStack, wait_until

ROOT = Path(__file__).parents[2]
SLOTS = 16
TRACE = "0af7651916cd43dd8448eb211c80319c"


def run(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code in (0, None)


@pytest.fixture
def crowd(whole_stack: WholeStack) -> Iterator[str]:
    """All slots are taken, and this one waits."""
    with Client(whole_stack.doors[0].grpc) as client:
        with whole_stack.held():
            some = client.submit("A guest", n=SLOTS, max_tokens=900, ignore_eos=True)
            waits = client.submit("The chef", max_tokens=5, ignore_eos=True)
            yield waits
            client.cancel(some)
        client.wait(waits)


def test_ps_and_trace(
    whole_stack: WholeStack, crowd: str, capsys: pytest.CaptureFixture[str]
) -> None:
    address = whole_stack.doors[0].grpc

    def listed() -> dict[str, str]:
        run("ps", "--address", address, "--json")
        told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        return {one["id"]: one["state"] for one in told}

    wait_until(lambda: listed().get(crowd) in ("waiting", "running"), "it is listed")
    run("ps", "--address", address)
    assert capsys.readouterr().out.startswith("REQUEST")
    run("trace", crowd, "--address", address)
    told = capsys.readouterr().out
    assert "no spans were made of it" in told
    assert "1 steps" not in told
    assert "kaiten.queue" in told
    run("trace", f"cmpl-{crowd}", "--address", address, "--json")
    told = json.loads(capsys.readouterr().out)
    assert told["url"] is None
    assert "kaiten.queue" in [span["name"] for span in told["spans"]]
    # Whose client brought a trace: its record says so to every gateway, also to one without spans.
    reply = httpx.post(
        f"{whole_stack.doors[0].openai}/responses",
        # It waits behind the crowd, and nobody for it.
        json={"input": "The chef", "max_output_tokens": 16, "background": True},
        headers={"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"},
        timeout=None,
    )
    run("trace", reply.json()["id"], "--address", address)
    assert f"trace {TRACE}  http://" in capsys.readouterr().out


@pytest.mark.skipif(not shutil.which("tmux"), reason="no tmux here: apt install tmux")
def test_top_in_a_terminal(whole_stack: WholeStack, tmp_path: Path) -> None:
    """Drawn, live, and gone at `q`."""
    pytest.importorskip("textual", reason="kaiten[top] is not installed")
    tmux = ["tmux", "-S", str(tmp_path / "tmux"), "-f", "/dev/null"]
    command = [sys.executable, "-m", "kaiten", "top", "--address", whole_stack.doors[0].grpc]

    def screen() -> str:
        words = [*tmux, "capture-pane", "-p", "-t", "top"]
        return subprocess.run(words, capture_output=True, text=True, check=False).stdout

    begun = [*tmux, "new-session", "-d", "-s", "top", "-x", "150", "-y", "40", *command]
    subprocess.run(begun, cwd=ROOT, check=True)
    try:
        wait_until(lambda: f"/{SLOTS} running" in screen(), "the cell is drawn")
        wait_until(lambda: f"/{SLOTS} " in screen().partition("running")[2], "and its worker")
        subprocess.run([*tmux, "send-keys", "-t", "top", "b"], check=True)
        wait_until(lambda: "· free" in screen(), "the KV map is drawn")
        subprocess.run([*tmux, "send-keys", "-t", "top", "q"], check=True)
        wait_until(lambda: not screen(), "it has ended, and its terminal with it")
    finally:
        subprocess.run([*tmux, "kill-server"], capture_output=True, check=False)
