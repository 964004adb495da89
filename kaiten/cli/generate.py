"""`kaiten generate`: one prompt from the command line, a file or standard input."""

import json
import sys
from dataclasses import asdict
from os.path import expanduser
from pathlib import Path

from kaiten.cli.complaint import RESUME_S, complain, problem_of
from kaiten.client import TLS, Client, Completion, Generation
from kaiten.client.errors import ApiError
from kaiten.client.request import GenerateOptions
from kaiten.console import say


def prompt_of(prompt: str | None, file: Path | None) -> str:
    """What is to be continued; without the line end that `echo` and editors put behind a text.

    ValueError: it is nowhere, in two places, or no text.
    """
    if prompt is not None and file is not None:
        raise ValueError("give a prompt or --file, not both")
    if file is not None:
        return _without_end(_text_of("--file", file))
    if prompt is None and not sys.stdin.isatty():
        try:
            return _without_end(sys.stdin.buffer.read().decode())
        except UnicodeDecodeError as error:
            raise ValueError(f"standard input is not UTF-8: {error.reason}") from error
    if prompt is None:
        raise ValueError("PROMPT is missing: a text, a pipe into standard input, or --file")
    return prompt


def _without_end(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")


def structured_of(
    json_schema: Path | None, grammar: Path | None, regex: str | None
) -> dict[str, str] | None:
    """What the answer must be; None: anything. ValueError: a file is none, or several are given."""
    given = {"--json-schema": json_schema, "--grammar": grammar, "--regex": regex}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise ValueError(f"give one of {' and '.join(named)}")
    if json_schema is not None:
        return {"json": _text_of("--json-schema", json_schema)}
    if grammar is not None:
        return {"grammar": _text_of("--grammar", grammar)}
    return None if regex is None else {"regex": regex}


def _text_of(option: str, file: Path) -> str:
    try:
        # Without the mark that some editors begin it with.
        return Path(expanduser(file)).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"{option} {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} {file} is not UTF-8: {error.reason}") from error


def generate(
    address: str,
    tls: TLS | None,
    prompt: str,
    *,
    api_key: str | None,
    as_json: bool,
    options: GenerateOptions,
) -> int:
    """Print the continuation as it comes, or all of it as JSON; the exit code."""
    try:
        with (
            Client(address, resume_s=RESUME_S, api_key=api_key, tls=tls or False) as client,
            client.generate(prompt, **options) as generation,
        ):
            if as_json:
                say(_json(generation.result) + "\n")
            else:
                _stream(generation)
            problem = problem_of(generation.result.choices[0])
    except ApiError as error:
        return complain(error, address)
    return 0 if problem is None else complain(problem, address)


def _json(completion: Completion) -> str:
    """One line. What was not asked for is not there."""
    told = asdict(completion)
    told["choices"] = [
        {
            key: value
            for key, value in choice.items()
            if value is not False and value not in ((), "")
        }
        for choice in told["choices"]
    ]
    if completion.prompt is None:
        del told["prompt"]
    return json.dumps(told, ensure_ascii=False)


def _stream(generation: Generation) -> None:
    """What is said after it begins a line, be it why it broke off."""
    end = ""
    try:
        for delta in generation:
            say(delta.text)
            end = "\n"
        end = "\n"
    finally:
        say(end)
