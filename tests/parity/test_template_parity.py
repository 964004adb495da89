"""Chat templates of the published kinds read exactly as transformers renders them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway.text.chat_template import ChatTemplate
from tests.unit.gateway.text.test_template import BOT, NAMES, SHAPES, SYSTEM, USER

# Written for this test in the manner of model families; none is copied.
FAMILIES = {
    "headers": (
        "{{- bos_token }}{%- for message in messages %}"
        "{{- '<|head|>' + message['role'] + '<|/head|>\n\n' }}"
        "{{- message['content'] | trim + '<|eot|>' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|head|>assistant<|/head|>\n\n' }}{%- endif %}"
    ),
    "turns": (
        "{{ bos_token }}{% for message in messages %}"
        "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
        "{{ '<turn>' + role + '\n' + message['content'] | trim + '</turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"
    ),
    "default system": (
        "{% if messages[0]['role'] != 'system' %}{{ '<sys>You are helpful.</sys>' }}{% endif %}"
        "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}"
        "{{ '</' + m.role + '>' }}{% endfor %}"
    ),
    "instruction": (
        "{% for m in messages %}{% if m['role'] == 'user' %}"
        "### Instruction:\n{{ m['content'] }}\n\n"
        "{% elif m['role'] == 'assistant' %}### Response:\n{{ m['content'] }}{{ eos_token }}\n\n"
        "{% else %}{{ m['content'] }}\n\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}### Response:\n{% endif %}"
    ),
    "dated": (
        "{% set year = strftime_now('%Y') %}{{ 'Year: ' + year + '\n' }}"
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }} {{ m.content }}\n{% endfor %}"
    ),
    "namespaced": (
        "{%- set ns = namespace(found=false) -%}{%- for m in messages -%}"
        "{%- if m.role == 'system' -%}{%- set ns.found = true -%}{%- endif -%}{%- endfor -%}"
        "{{ 'with' if ns.found else 'without' }} system"
        "{% for m in messages %}|{{ m.role }}{% endfor %}"
    ),
}
CONVERSATIONS: list[list[dict[str, str]]] = [
    [USER],
    [USER, BOT, USER],
    [SYSTEM, USER],
    [SYSTEM, USER, BOT, USER],
]
ORACLE = """
import json, sys
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
asked = json.load(sys.stdin)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **asked["names"])
answers = []
for template in asked["templates"]:
    for messages in asked["conversations"]:
        answers.append(tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True))
json.dump(answers, sys.stdout)
"""


@pytest.fixture(scope="module")
def oracle() -> list[str]:
    """What transformers renders, in the order of templates, then conversations."""
    question: dict[str, Any] = {
        "names": NAMES,
        "templates": [*FAMILIES.values(), *SHAPES],
        "conversations": CONVERSATIONS,
    }
    done = subprocess.run(
        [sys.executable, "-P", "-c", ORACLE],
        input=json.dumps(question),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=Path("/"),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers: list[str] = json.loads(done.stdout)
    return answers


def test_every_shape_equals_transformers(oracle: list[str]) -> None:
    templates = [*FAMILIES.values(), *SHAPES]
    assert len(templates) >= 12
    rendered = [
        ChatTemplate(template, NAMES).render(messages)
        for template in templates
        for messages in CONVERSATIONS
    ]
    for number, (ours, theirs) in enumerate(zip(rendered, oracle, strict=True)):
        assert ours == theirs, templates[number // len(CONVERSATIONS)]
