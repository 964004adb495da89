"""`kaiten serve --config FILE`: flags from a TOML file, where the command line leaves them out."""

import tomllib
from difflib import get_close_matches
from os.path import expanduser
from pathlib import Path
from typing import Any

from cyclopts import App, ArgumentCollection, CycloptsError
from cyclopts.config import Dict

from kaiten.cli.mistakes import INSTEAD


def without_empty(_app: App, _commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """A variable that is empty, as files of variables leave those that are not wanted, is none."""
    for each in arguments:
        each.tokens = [token for token in each.tokens if token.value or token.source != "env"]


def from_file(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Adds what the named file says. CycloptsError: it cannot be read, or has what no flag has."""
    named = [each for each in arguments if "--config" in each.names and each.tokens]
    if commands != ("serve",) or not named:
        return
    path = named[0].tokens[0].value
    table = _table(path)
    names = {name.removeprefix("--") for each in arguments for name in each.names}
    known = sorted(names - {"config"})
    for key in table:
        if key not in known:
            raise CycloptsError(msg=f"--config {path}: unknown key {key!r}{_hint(key, known)}")
    Dict(table, source=path, use_commands_as_keys=False)(app, commands, arguments)


def _table(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(expanduser(path)).read_text(encoding="utf-8"))
    except OSError as error:
        raise CycloptsError(msg=f"--config {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CycloptsError(msg=f"--config {path} is not TOML: {error}") from error


def _hint(key: str, known: list[str]) -> str:
    if f"--{key}" in INSTEAD:
        return f": {INSTEAD[f'--{key}']}"
    close = get_close_matches(key.replace("_", "-"), known, n=1)
    return f"; did you mean {close[0]}?" if close else ""
