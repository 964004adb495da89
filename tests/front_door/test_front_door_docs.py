"""What README.md and the pages on calling it say to paste is run as it stands, on a real stack."""

import re
import shlex
from pathlib import Path

import grpc
import httpx
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import Parse
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from tests.support.programs import close_clients
from tests.support.whole_stack import MODEL, WholeStack

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "docs/clients.md",
    "deploy/README.md",
    "docs/structured-output.md",
    "docs/tools.md",
)
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
CURL, GRPCURL = (
    re.compile(rf"^{program} (?:\\\n|'[^']*'|[^'\n])+$", re.MULTILINE)
    for program in ("curl", "grpcurl")
)


def found(pattern: re.Pattern[str]) -> list[str]:
    """But for those with a stack of their own, which tests/integration/test_llm.py has."""
    texts = [text for page in PAGES for text in pattern.findall((ROOT / page).read_text())]
    return [text for text in texts if "import LLM" not in text]


def at(stack: WholeStack, text: str) -> str:
    """The same words, to this stack's addresses and model."""
    text = text.replace("127.0.0.1:50051", stack.door.grpc).replace("kaiten-mini", MODEL)
    text = text.replace("Client()", f'Client("{stack.door.grpc}")')
    return text.replace("http://127.0.0.1:8000", stack.door.http)


@pytest.mark.parametrize("program", found(PYTHON))
def test_python(program: str, whole_stack: WholeStack, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    exec(compile(at(whole_stack, program), "snippet", "exec"), names)
    close_clients(names)
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("line", found(CURL))
def test_curl(line: str, whole_stack: WholeStack) -> None:
    """Read as a shell reads it; a `curl` may not be there."""
    _, url, *words = shlex.split(at(whole_stack, line).replace("\\\n", " "))
    flags = dict(zip(words[::2], words[1::2], strict=True))
    assert flags.keys() == {"-H", "-d"}
    name, _, value = flags["-H"].partition(": ")
    answer = httpx.post(url, headers={name: value}, content=flags["-d"], timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["finish_reason"] in ("stop", "length", "tool_calls")


@pytest.mark.parametrize("line", found(GRPCURL))
def test_grpcurl(line: str, whole_stack: WholeStack) -> None:
    """As it reads the line: the message is made by what the gateway's reflection says of it."""
    _, *words = shlex.split(at(whole_stack, line).replace("\\\n", " "))
    plaintext, data, content, address, method = words
    assert (plaintext, data) == ("-plaintext", "-d")
    service, _, name = method.partition("/")
    with grpc.insecure_channel(address) as channel:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        found = pool.FindServiceByName(service).FindMethodByName(name)
        asked, told = map(GetMessageClass, (found.input_type, found.output_type))
        call = channel.unary_stream(
            f"/{method}",
            request_serializer=asked.SerializeToString,
            response_deserializer=told.FromString,
        )
        *_, last = call(Parse(content, asked()), timeout=60)
    assert last.event.HasField("done")


def test_all_were_found() -> None:
    assert [len(found(each)) for each in (PYTHON, CURL, GRPCURL)] == [10, 4, 1]
