"""A request that waited for others explains itself: over HTTP, gRPC and at a terminal."""

import json
import re
import socket
import time
from itertools import pairwise

import httpx
import pytest

from kaiten.cli.app import main
from kaiten.client import Client
from tests.support.whole_stack import WAIT_S, WholeStack, wait_until

SLOTS = 16


def test_who_waited_is_told_for_what(
    whole_stack: WholeStack, capsys: pytest.CaptureFixture[str]
) -> None:
    """All slots are taken when it comes."""
    door = whole_stack.doors[0]
    with Client(door.grpc) as client:
        # Both have come before a step of the first is done.
        with whole_stack.held():
            crowd = client.submit("A guest", n=SLOTS, max_tokens=900, ignore_eos=True)
            id = client.submit("The chef", n=2, max_tokens=40, ignore_eos=True)
            url = f"{door.http}/v1/requests/{id}/explain"
            wait_until(lambda: httpx.get(url, timeout=WAIT_S).is_success, "it waits")

        def is_told() -> bool:
            return "every slot is taken" in httpx.get(url, timeout=WAIT_S).text

        wait_until(is_told, "it is told for what")
        client.cancel(crowd)
        client.wait(id)
    told = httpx.get(url, timeout=WAIT_S).json()
    assert [choice["ended"] for choice in told["choices"]] == ["length"] * 2
    for choice in told["choices"]:
        intervals = choice["intervals"]
        assert intervals[0]["start_ms"] == 0
        for one, other in pairwise(intervals):
            assert one["start_ms"] + one["ms"] == pytest.approx(other["start_ms"], abs=1e-3)
        total_ms = sum(each["ms"] for each in intervals)
        assert total_ms == pytest.approx(choice["ms"], abs=1e-3)
        phases = [each["phase"] for each in intervals]
        assert phases[0] == "accept"
        assert "unknown" not in phases
        # Its client left as soon as it was accepted: what came after nobody here has measured.
        assert choice["latency_ms"] is None
        began = len(phases) - phases[::-1].index("prefill")
        assert sum(each["steps"] for each in intervals[began:]) == 39

    shown = {}
    for flags in ([], ["--json"]):
        with pytest.raises(SystemExit) as ended:
            main(["explain", f"cmpl-{id}", "--address", door.grpc, *flags])
        assert ended.value.code in (0, None)
        shown[bool(flags)] = capsys.readouterr().out
    assert shown[False].count("ended: length") == 2
    assert "every slot is taken" in shown[False]
    assert len(json.loads(shown[True])["choices"]) == 2


def test_all_that_a_client_waited_for_is_told(whole_stack: WholeStack) -> None:
    """From its first byte at the gateway to its last."""
    door, body = whole_stack.doors[0], {"prompt": "The chef", "max_tokens": 200, "ignore_eos": True}
    for stream in (False, True):
        reply = httpx.post(
            f"{door.openai}/completions", json={**body, "stream": stream}, timeout=WAIT_S
        )
        id = re.search('"id":"([^"]+)"', reply.text)
        assert id is not None
        url = f"{door.http}/v1/requests/{id[1]}/explain"
        (choice,) = httpx.get(url, timeout=WAIT_S).json()["choices"]
        total_ms = sum(each["ms"] for each in choice["intervals"])
        # The store's clock counts milliseconds.
        assert total_ms == pytest.approx(choice["latency_ms"], rel=0.02, abs=2)
        assert {each["phase"] for each in choice["intervals"]} >= {"accept", "queue", "decode"}


def test_a_client_that_does_not_read_is_the_reason(whole_stack: WholeStack) -> None:
    """More than fits into all buffers on the way; all of it is computed before it is read."""
    door = whole_stack.doors[0]
    host, _, port = door.http.removeprefix("http://").partition(":")
    body = {
        "messages": [{"role": "user", "content": "The chef"}],
        "max_tokens": 450,
        "n": 4,
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 20,
        "stream": True,
    }
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        content, began_s = json.dumps(body).encode(), time.monotonic()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        connection.sendall(head.encode() + content)
        first = connection.recv(4096)
        while (id := re.search(rb'"id":"([^"]+)"', first)) is None:
            first += connection.recv(4096)
        url = f"{door.http}/v1/requests/{id[1].decode()}/explain"

        def is_computed() -> bool:
            return all(each["ended"] for each in httpx.get(url, timeout=WAIT_S).json()["choices"])

        wait_until(is_computed, "the end of all that is computed")
        # As long again as it took, and what the client did is half of all.
        computed_s = time.monotonic() - began_s
        wait_until(lambda: time.monotonic() > began_s + 2 * computed_s, "the client's half")
        while connection.recv(1 << 20):
            pass
    choices = httpx.get(url, timeout=WAIT_S).json()["choices"]
    for choice in choices:
        told = dict.fromkeys(("reader", "unknown"), 0.0)
        for each in choice["intervals"]:
            told[each["phase"]] = told.get(each["phase"], 0.0) + each["ms"]
        assert sum(told.values()) == pytest.approx(choice["latency_ms"], rel=0.02, abs=2)
        assert told["reader"] >= 0.9 * computed_s * 1000
        assert told["unknown"] == 0


def test_of_a_request_that_nobody_knows_nothing_is_told(
    whole_stack: WholeStack, capsys: pytest.CaptureFixture[str]
) -> None:
    door = whole_stack.doors[0]
    reply = httpx.get(f"{door.http}/v1/requests/cmpl-nobody/explain", timeout=WAIT_S)
    assert reply.status_code == 404
    assert "'nobody'" in reply.json()["error"]["message"]
    wrong = httpx.get(f"{door.http}/v1/requests/{'x' * 200}/explain", timeout=WAIT_S)
    assert wrong.status_code == 400
    assert wrong.json()["error"]["message"].startswith("id: must match")
    wrong = httpx.get(
        f"{door.http}/v1/requests/nobody/explain", params={"tenant": "a:b"}, timeout=WAIT_S
    )
    assert wrong.json()["error"]["message"].startswith("tenant: must match")
    with pytest.raises(SystemExit) as ended:
        main(["explain", "nobody", "--address", door.grpc])
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert "request 'nobody' not found: it does not live and did not end of late" in said
    assert "kaiten explain nobody --archive .kaiten" in said
