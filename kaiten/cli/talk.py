"""`kaiten generate` and `kaiten chat`: the client at a terminal."""

import sys

from rich.text import Text

from kaiten.api_key import HOW_TO_GIVE
from kaiten.client import TLS, Client, Generation
from kaiten.client.errors import ApiError, UnauthenticatedError, UnavailableError
from kaiten.console import console

# A person is watching: say quickly that nobody answers.
RESUME_S = 5.0


def generate(
    address: str,
    tls: TLS | None,
    prompt: str,
    *,
    api_key: str | None,
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    seed: int | None,
    stop: tuple[str, ...],
) -> int:
    """Print the continuation as it comes; the exit code."""
    try:
        with (
            Client(address, resume_s=RESUME_S, api_key=api_key, tls=tls or False) as client,
            client.generate(
                prompt,
                max_tokens=max_tokens,
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                seed=seed,
                stop=stop,
            ) as generation,
        ):
            _stream(generation)
            choice = generation.result.choices[0]
    except ApiError as error:
        return complain(error, address)
    if choice.finish_reason == "error":
        return complain(ApiError(choice.error), address)
    return 0


def chat(
    address: str,
    tls: TLS | None,
    *,
    api_key: str | None,
    system: str | None,
    max_tokens: int | None,
    temperature: float | None,
) -> int:
    """Turns until Ctrl-D; the exit code."""
    messages = [{"role": "system", "content": system}] if system else []
    with Client(address, resume_s=RESUME_S, api_key=api_key, tls=tls or False) as client:
        while (said := _read_line()) is not None:
            if not said.strip():
                continue
            messages.append({"role": "user", "content": said})
            generation = client.generate(
                messages=messages, max_tokens=max_tokens, temperature=temperature
            )
            try:
                with generation:
                    answer = _stream(generation)
            except KeyboardInterrupt:
                print(" …")
                messages.pop()
                continue
            except ApiError as error:
                return complain(error, address)
            messages.append({"role": "assistant", "content": answer})
    return 0


def _stream(generation: Generation) -> str:
    """Write the first choice to stdout as it arrives; the whole text."""
    text = ""
    for delta in generation:
        sys.stdout.write(delta.text)
        sys.stdout.flush()
        text += delta.text
    sys.stdout.write("\n")
    return text


def _read_line() -> str | None:
    """A line of the user's, None at the end of input."""
    try:
        return input("› " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        return None


def complain(error: ApiError, address: str) -> int:
    """Say what went wrong, and what to do; the exit code."""
    text = Text(f"error: {error}", style="red")
    if isinstance(error, UnavailableError):
        text.append(f"\nis a gateway listening on {address}? start one with: kaiten serve")
    elif isinstance(error, UnauthenticatedError):
        text.append(f"\n{HOW_TO_GIVE}")
    elif error.retry_after_s is not None:
        text.append(f"\ntry again in {error.retry_after_s:g} s")
    console().print(text)
    return 1
