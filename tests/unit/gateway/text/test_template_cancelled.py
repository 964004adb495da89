"""Clients that leave while a template is rendered: the next one gets its own answer."""

import asyncio
from contextlib import suppress

import pytest

from gateway.text.template_process import TemplateProcess

TEMPLATE = "{{ messages[0].content }}"


def message(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("steps", [*range(1, 8), 20, 100])
async def test_leaving_while_the_child_starts(steps: int) -> None:
    """Cancelled after so many turns of the loop, which is anywhere between fork and answer."""
    process = TemplateProcess(TEMPLATE, {})
    try:
        leaving = asyncio.create_task(process.render(message("left")))
        for _ in range(steps):
            await asyncio.sleep(0.002 if steps > 10 else 0)
        leaving.cancel()
        with suppress(asyncio.CancelledError):
            assert await leaving == ["left"]
        assert await process.render(message("next")) == ["next"]
    finally:
        await process.close()


async def test_a_crowd_that_leaves_does_not_cost_a_child_each() -> None:
    process = TemplateProcess(TEMPLATE, {})
    try:
        await asyncio.gather(*(child.start() for child in process._children))
        children = [child.process for child in process._children]
        for index in range(50):
            leaving = asyncio.create_task(process.render(message(f"left {index}")))
            for _ in range(index % 5):
                await asyncio.sleep(0)
            leaving.cancel()
            with suppress(asyncio.CancelledError):
                await leaving
        texts = [f"stays {index}" for index in range(10)]
        assert await asyncio.gather(*(process.render(message(text)) for text in texts)) == [
            [text] for text in texts
        ]
        assert [child.process for child in process._children] == children
    finally:
        await process.close()
