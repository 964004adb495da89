"""Chat templates: equal to what their authors meant, and harmless whatever they try."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.children import child
from gateway.children.pool import ChildLimits
from gateway.text import template_child
from gateway.text.chat_template import ChatTemplate, TemplateFailed
from gateway.text.template_process import TemplateProcess
from service_kit.errors import InvalidRequest
from tests.support.gateway_stack import until

USER = {"role": "user", "content": "hi <there>"}
SYSTEM = {"role": "system", "content": " be brief "}
BOT = {"role": "assistant", "content": "yes"}
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INST = (
    "{%- if messages[0]['role'] == 'system' -%}{%- set system = messages[0]['content'] -%}"
    "{%- set loop_messages = messages[1:] -%}{%- else -%}{%- set loop_messages = messages -%}"
    "{%- endif -%}{{ bos_token }}{%- for m in loop_messages -%}"
    "{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('roles must alternate') }}{%- endif -%}"
    "{%- if m['role'] == 'user' -%}[INST] "
    "{%- if loop.first and system is defined -%}{{ system|trim }}\n\n{%- endif -%}"
    "{{ m['content'].strip() }} [/INST]{%- else -%}{{ m['content'] + eos_token }}{%- endif -%}"
    "{%- endfor -%}"
)


SHAPES = [
    CHATML,
    INST,
    "{{ messages|tojson }}",
    "{{ messages|tojson(indent=2) }}",
    "{% if tools %}T{% else %}no tools{% endif %}",
    "{% if documents is none %}none{% endif %}{% if x is defined %}x{% endif %}",
    "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}x{{ loop.index }}{% endfor %}",
    "{% for m in messages if m.role != 'system' %}{{ m.role }},{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}",
    "{%- macro f(x) -%}<{{ x }}>{%- endmacro -%}{{ f(bos_token) }}",
    "  {% if true %}\n  x\n  {% endif %}\n",
    "{{ messages[0].content.split(' ')[-1] }}{{ messages[-1]['role'].upper() }}",
    "{{ messages[0]['content'] | trim }}{{ messages[0].content.strip() }}",
    "{{ messages | map(attribute='role') | join(' ') }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
    "{{ messages[::-1][0].role }}{{ messages[1:] | length }}{{ 'a' in messages[0].content }}",
    "{%- if messages[0].content is string %}text{% endif %}{{ messages[0].get('name', 'none') }}",
    "{{ bos_token ~ ' ' ~ eos_token }}{{ 'x' if add_generation_prompt else 'y' }}",
]


@pytest.mark.parametrize("source", SHAPES)
@pytest.mark.parametrize("messages", [[USER], [SYSTEM, USER, BOT], [SYSTEM, USER]])
def test_rendering_equals_jinja(source: str, messages: list[dict[str, str]]) -> None:
    """Against the engine that templates are written for, set up as transformers does."""
    jinja = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    jinja.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent
    )
    names = {**NAMES, "tools": None, "documents": None, "add_generation_prompt": True}
    expected = jinja.from_string(source).render(messages=messages, **names)
    assert ChatTemplate(source, NAMES).render(messages) == expected


def test_names_that_jinja_lacks() -> None:
    marked = "a\n{% generation %}\nb\n{% endgeneration %}\nc"
    assert ChatTemplate(marked).render([USER]) == "a\nb\nc"
    year = ChatTemplate("{{ strftime_now('%Y') }}").render([USER])
    assert year.isdecimal()
    assert len(year) == 4


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (INST, "roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "undefined"),
        ("{% include '/etc/passwd' %}", "not found"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "fuel"),
        ("{{ 1 // 0 }}", "unable to calculate"),
    ],
)
def test_refusals_are_sentences(source: str, says: str) -> None:
    with pytest.raises(TemplateFailed, match=says):
        ChatTemplate(source).render([BOT])


def test_a_broken_template_is_found_when_compiled() -> None:
    with pytest.raises(TemplateFailed, match="does not compile"):
        ChatTemplate("{% if %}")


# Lists, as the characters of a text are paid for in fuel from minijinja 3.1 on. The thirtieth sum
# or so is made whole, and its first part alone outgrows the memory.
BOMB = (
    "{% if messages[0].content == 'bomb' %}{% set ns = namespace(x=[0]) %}"
    "{% set many = [0] * 90000000 %}"
    "{% for i in range(40) %}{% set ns.x = many + ns.x %}{% endfor %}{{ ns.x|length }}"
    "{% elif messages[0].content == 'long' %}{{ 'a' * 100000 }}"
    "{% elif messages[0].content[:3] == 'day' %}{{ strftime_now(5) }}"
    "{% else %}{{ messages[0].content }}{% endif %}"
)


@pytest.fixture
async def process() -> AsyncIterator[TemplateProcess]:
    limits = ChildLimits(answer_s_max=60.0, text_bytes_max=10_000)
    running = TemplateProcess(BOMB, {}, limits)
    await running.start()
    yield running
    await running.close()


def said(content: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


async def test_a_memory_bomb_kills_only_its_child(process: TemplateProcess) -> None:
    with pytest.raises(InvalidRequest, match="memory"):
        await process.render(said("bomb"))
    with pytest.raises(InvalidRequest, match="must have at most 10000 bytes, got 100000"):
        await process.render(said("long"))
    assert await process.render(said("日本 😀")) == ["日本 😀"]


async def test_a_slow_rendering_is_killed_and_the_loop_stays_free() -> None:
    running = TemplateProcess(BOMB, {}, ChildLimits(answer_s_max=0.0))
    await running.start()
    with pytest.raises(InvalidRequest, match="longer than 0 s"):
        await running.render(said("hello"))
    await running.close()


async def test_a_cancelled_rendering_leaves_no_stale_answer(process: TemplateProcess) -> None:
    asking = asyncio.create_task(process.render(said("first")))
    await asyncio.sleep(0)
    asking.cancel()
    await until(asking.done, "the cancel")
    assert await process.render(said("second")) == ["second"]


async def test_many_renderings_take_turns(process: TemplateProcess) -> None:
    texts = [f"text {index}" for index in range(20)]
    assert await asyncio.gather(*(process.render(said(text)) for text in texts)) == [
        [text] for text in texts
    ]


async def test_a_second_child_starts_when_two_are_asked_at_once(process: TemplateProcess) -> None:
    (first,) = pids(process)
    for index in range(3):
        assert await process.render(said(f"text {index}")) == [f"text {index}"]
    assert pids(process) == [first]
    await asyncio.gather(*(process.render(said("both")) for _ in range(2)))
    assert pids(process)[0] == first
    assert len(pids(process)) == 2


@pytest.mark.parametrize("text", ["д" * 4_500, "\x01" * 9_000, '"\\' * 4_500, "日" * 3_000])
async def test_every_text_that_fits_may_be_said(process: TemplateProcess, text: str) -> None:
    """Whatever JSON makes of it between the processes."""
    children = pids(process)
    assert await process.render(said(text)) == [text]
    assert pids(process) == children


async def test_no_error_of_a_template_costs_a_child(process: TemplateProcess) -> None:
    children = pids(process)
    with pytest.raises(InvalidRequest, match="the chat template says: TypeError: "):
        await process.render(said("day"))
    with pytest.raises(InvalidRequest, match="at most 10000 bytes"):
        await process.render(said("long"))
    assert await process.render(said("next")) == ["next"]
    assert pids(process) == children


@pytest.mark.parametrize(
    ("source", "prompt"),
    [
        ("{% for m in messages %}[{{ m.content }}]{% endfor %}", "[hi][  so "),
        ("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}", "[hi][so"),
        ("{{ messages[-1].content }}{{ messages[-1].content }}", None),
        ("{{ messages[0].content }}", None),
    ],
)
def test_the_last_message_goes_on_or_is_refused(source: str, prompt: str | None) -> None:
    setup = {"source": source, "names": {}, "control_texts": ["<|end|>"], "text_bytes_max": 99}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "  so "}]
    renderer = template_child.Renderer(setup)
    question = {"messages": messages, "options": {}, "goes_on": True, "controls_max": 9}
    if prompt is not None:
        assert renderer(question) == {"pieces": [prompt]}
        return
    with pytest.raises(child.Refused, match="cannot go on") as caught:
        renderer(question)
    assert caught.value.at == 1


def test_a_fault_of_the_engine_itself_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its panics are no Exception."""

    class PanicException(BaseException):
        pass

    def render(*_given: object, **_named: object) -> str:
        raise PanicException("index out of bounds")

    monkeypatch.setattr(ChatTemplate, "render", render)
    setup = {"source": "", "names": {}, "control_texts": [], "text_bytes_max": 9}
    question = {"messages": [], "options": {}, "goes_on": False}
    framed = child.answered(template_child.Renderer(setup), question)
    answer = json.loads(framed[child.LENGTH.size :])
    assert answer == {"error": "says: PanicException: index out of bounds"}


def test_a_child_whose_parent_died_while_it_was_set_up_ends_without_a_word() -> None:
    """As by a kill -9 at a gateway's start: there is nobody to answer any more."""
    setup = {"source": "", "names": {}, "control_texts": [], "text_bytes_max": 9}
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as gone:
        ended = subprocess.run(
            [sys.executable, "-m", template_child.__name__],
            input=child.frame(setup),
            stdout=gone,
            stderr=subprocess.PIPE,
            timeout=60,
        )
    assert (ended.returncode, ended.stderr) == (0, b"")


async def test_while_a_child_is_replaced_another_one_answers(process: TemplateProcess) -> None:
    """A bomb for one of two: the other is never touched."""
    await asyncio.gather(*(process.render(said("begin")) for _ in range(2)))
    children = pids(process)
    assert len(children) == 2
    with pytest.raises(InvalidRequest, match="memory"):
        await process.render(said("bomb"))
    # The killed one joins the free ones when it is ready again, so these go to the other.
    for index in range(5):
        assert await process.render(said(f"text {index}")) == [f"text {index}"]
    await until(lambda: process._free.qsize() == 2, "both children")
    assert len(set(pids(process)) & set(children)) == 1


async def test_control_tokens_that_clients_write_are_told_apart() -> None:
    running = TemplateProcess(CHATML, NAMES, control_texts=["<|im_end|>", "</s>"])
    try:
        pieces = await running.render([{"role": "user", "content": "a</s>b<|im_end|>"}])
    finally:
        await running.close()
    end = "<|im_end|>"
    tail = f"{end}\n<|im_start|>assistant\n"
    assert pieces == ["<|im_start|>user\na", "</s>", "b", end, tail]


def pids(process: TemplateProcess) -> list[int]:
    return [child.process.pid for child in process._children if child.process is not None]
