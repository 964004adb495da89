"""A request that waited for others explains itself: over HTTP, gRPC and at a terminal."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import httpx
import pytest

from kaiten.cli.app import main
from tests.support.whole_stack import WholeStack

SLOTS = 16


def answered(http: str, **more: Any) -> tuple[dict[str, Any], float]:
    """A completion, and the milliseconds until it was there."""
    body = {"prompt": "The chef", "ignore_eos": True, "temperature": 0} | more
    began_s = time.monotonic()
    reply = httpx.post(f"{http}/v1/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    return reply.json(), 1000 * (time.monotonic() - began_s)


def test_who_waited_is_told_for_what(
    whole_stack: WholeStack, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twice as many choices as there are slots: the last of them all waited for one."""
    door = whole_stack.doors[0]
    with ThreadPoolExecutor(2) as both:
        first = both.submit(answered, door.http, n=SLOTS, max_tokens=120, prompt="A guest")
        second = both.submit(answered, door.http, n=SLOTS, max_tokens=60)
        asked = [first.result(), second.result()]
    waited = 0
    for reply, took_ms in asked:
        told = httpx.get(f"{door.http}/v1/requests/{reply['id']}/explain").json()
        assert (told["id"], len(told["choices"])) == (reply["id"], SLOTS)
        for choice in told["choices"]:
            intervals = choice["intervals"]
            assert choice["ended"] == "length"
            assert intervals[0]["start_ms"] == 0
            for one, other in pairwise(intervals):
                assert one["start_ms"] + one["ms"] == pytest.approx(other["start_ms"], abs=1e-3)
            assert sum(each["ms"] for each in intervals) == pytest.approx(choice["ms"], abs=1e-3)
            assert 0 < choice["ms"] <= took_ms + 1
            assert "unknown" not in {each["phase"] for each in intervals}
            waited += any(each["why"] == "every slot is taken" for each in intervals)
    assert waited

    id = asked[1][0]["id"]
    with pytest.raises(SystemExit) as ended:
        main(["explain", id, "--address", door.grpc, "--json"])
    assert ended.value.code in (0, None)
    assert len(json.loads(capsys.readouterr().out)["choices"]) == SLOTS
    with pytest.raises(SystemExit):
        main(["explain", id, "--address", door.grpc])
    shown = capsys.readouterr().out
    assert shown.count("ended: length") == SLOTS
    assert "steps," in shown


def test_of_a_request_that_nobody_knows_nothing_is_told(
    whole_stack: WholeStack, capsys: pytest.CaptureFixture[str]
) -> None:
    door = whole_stack.doors[0]
    reply = httpx.get(f"{door.http}/v1/requests/cmpl-nobody/explain")
    assert reply.status_code == 404
    assert "'nobody'" in reply.json()["error"]["message"]
    wrong = httpx.get(f"{door.http}/v1/requests/{'x' * 200}/explain")
    assert wrong.status_code == 400
    with pytest.raises(SystemExit) as ended:
        main(["explain", "nobody", "--address", door.grpc])
    assert ended.value.code == 1
    assert "'nobody' (live, or ended of late) not found" in capsys.readouterr().err
