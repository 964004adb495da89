"""Every command line that the documentation shows is one that the command takes."""

import re
from collections.abc import Iterator, Mapping
from typing import Final

from cyclopts import App

from gateway.settings import GatewaySettings
from gpu_worker.profile import ProfileSettings
from gpu_worker.settings import WorkerSettings
from kaiten.cli.app import app
from kaiten.local import services
from ledger.archive.__main__ import app as archive
from scheduler_svc.archive_replay import app as replay
from scheduler_svc.settings import SchedulerSettings
from service_kit.settings import _app
from tests.contract.test_docs import pages

APPS: Final[Mapping[str, App]] = {
    "gateway": _app(GatewaySettings, "gateway", ()),
    "gpu_worker": _app(WorkerSettings, "worker", ()),
    "gpu_worker.profile": _app(ProfileSettings, "profile", ()),
    "ledger.archive": archive,
    "scheduler_svc": _app(SchedulerSettings, "scheduler", ()),
    services.REPLAY: replay,
}
BLOCK: Final = re.compile(r"^```[\s\S]*?^```|(?:^ {4}.*\n)+", re.MULTILINE)
IN_BLOCK: Final = re.compile(r"^ *(?:\$ )?(?:[A-Z_]+=\S+ )*kaiten +([a-z-].*)", re.MULTILINE)
IN_SENTENCE: Final = re.compile(r"`kaiten ([a-z-][^`\n]*)`")
# Behind two spaces, a comment or a shell's sign a line tells what it does.
TOLD: Final = re.compile(r"\s{2,}|\s[#|>&;(]")
FLAG: Final = re.compile(r"--[a-z][a-z0-9-]*")
IN_CLI: Final = {"--help", "--version", "--install-completion"}


def shown() -> Iterator[tuple[str, list[str]]]:
    """Page and words, of every line that begins with a command."""
    for page in pages():
        if page.name == "CHANGELOG.md" or "adr" in page.parts:
            continue
        text = page.read_text().replace("\\\n", " ")
        blocks = "\n".join(BLOCK.findall(text))
        for line in IN_BLOCK.findall(blocks) + IN_SENTENCE.findall(BLOCK.sub("", text)):
            yield page.name, TOLD.split(line)[0].split()


def taken(words: list[str]) -> set[str]:
    """The flags of the command that these words are for; KeyError: there is no such command."""
    at, rest = app, words
    if words[0] in services.MODULES:
        at, rest = APPS[services.module(words[0], words[1:])], words[1:]
    while rest and rest[0] in at and not rest[0].startswith("-"):
        at, rest = at[rest[0]], rest[1:]
    assert at.default_command is not None or not rest or rest[0].startswith("--"), words
    if at.default_command is None:
        return set()
    return {name for each in at.assemble_argument_collection() for name in each.names}


def test_commands_and_flags_that_pages_show_are_there() -> None:
    lines = list(shown())
    wrong = [
        (page, " ".join(words), unknown)
        for page, words in lines
        if (unknown := set(FLAG.findall(" ".join(words))) - taken(words) - IN_CLI)
    ]
    assert not wrong
    assert len(lines) > 60
