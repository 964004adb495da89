"""`kaiten run` in a terminal: a stack, a conversation with it, and nothing left afterwards."""

import json
import re
import signal
from pathlib import Path

import httpx
import psutil

from tests.support.terminal import Terminal


def test_serve_and_chat_in_one(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    words = ["--threads", "1", "--dtype", "fp32", "--step-tokens", "512", "--temperature", "0"]
    saved = tmp_path / "talk.json"
    with Terminal("run", *words, "--system", "Be brief.", environ=environ) as terminal:
        told = terminal.until("Ctrl-D")
        terminal.until("› ")
        (url,) = re.findall(r"also at (http\S+)", told)
        models = httpx.get(f"{url}/v1/models", timeout=60).json()["data"]
        assert models[0]["id"] == "kaiten-mini"
        children = psutil.Process(terminal.process.pid).children(recursive=True)
        assert len(children) >= 5
        terminal.types("Hello!\r")
        answer = terminal.until("first after")
        terminal.until("› ")
        terminal.types(f"/save {saved}\r")
        terminal.until("saved 3 messages")
        terminal.until("› ")
        # As a session manager ends it; Ctrl-D is tried in test_chat.
        terminal.terminate()
        assert terminal.ends() == 128 + signal.SIGTERM
    system, question, said = json.loads(saved.read_text())["messages"]
    assert (system["content"], question["content"]) == ("Be brief.", "Hello!")
    assert said["content"].strip()
    assert said["content"].split()[0] in answer
    assert psutil.wait_procs(children, timeout=60)[1] == []
    assert not list(tmp_path.glob("kaiten-*"))


def test_a_model_that_cannot_chat(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    with Terminal("run", str(tmp_path)) as terminal:
        terminal.until("has no chat template: it continues texts, and answers nobody")
        assert terminal.ends() == 1
