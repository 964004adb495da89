"""`kaiten run MODEL`: `kaiten serve` and `kaiten chat` in one, for as long as somebody talks."""

import signal
import sys
from types import FrameType

from rich.text import Text

from kaiten.cli import packages
from kaiten.cli.chat.command import converse
from kaiten.cli.chat.state import Chat
from kaiten.cli.complaint import RESUME_S
from kaiten.cli.display import TerminalDisplay
from kaiten.client import Client
from kaiten.console import console
from kaiten.local.background import BackgroundStack, temporary_folder
from kaiten.local.model_source import ModelSource
from kaiten.local.part_options import WorkerOptions
from kaiten.local.stack import ServeOptions
from kaiten.start_error import StartError


def run(model: ModelSource, *, workers: int, worker: WorkerOptions, chat: Chat) -> int:
    """The exit code. Nothing of the stack outlives the conversation."""
    packages.require("serve")
    if not model.can_chat:
        raise StartError(
            f"{model.name} has no chat template: it continues texts, and answers nobody",
            f"kaiten serve {model.folder}, and then: kaiten generate TEXT",
        )
    signal.signal(signal.SIGTERM, _leave)
    with temporary_folder() as folder, TerminalDisplay() as display:
        options = ServeOptions(
            model=model,
            data_dir=folder,
            grpc_port=0,
            http_port=0,
            workers=workers,
            worker=worker,
        )
        with BackgroundStack(options, display) as running:
            display.all_ready()
            stack = running.stack
            told = f"{model.name}, also at {stack.http_url} and {stack.grpc_address}; /help, Ctrl-D"
            console().print(Text(told, style="dim"), soft_wrap=True)
            with Client(stack.private_address, resume_s=RESUME_S) as client:
                code = converse(client, chat, stack.private_address)
            display.be_quiet()
    return code


def _leave(number: int, _frame: FrameType | None) -> None:
    """As at the end of the conversation: every process is stopped."""
    sys.exit(128 + number)
