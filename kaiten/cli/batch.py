"""`kaiten batch FILE.jsonl`: every line answered once, also when it is killed and run again."""

import fcntl
import hashlib
import json
import re
import secrets
import time
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from os.path import expanduser
from pathlib import Path
from typing import Any, Final

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from kaiten.api_key import HOW_TO_GIVE
from kaiten.console import console, harmless
from kaiten.tls import TLS, certificate_problem, verifier
from kaiten.waits import doubled_s

# Between two looks: a batch tells nobody by itself.
LOOK_S: Final = 0.5
# A gateway that is away for longer is told of; the batch does not need us.
AWAY_S: Final = 60.0
WAIT_S_MAX: Final = 5.0
START_ONE: Final = "is a gateway listening there? start one with: kaiten serve"
NO_HTTP: Final = "does this port speak HTTP? kaiten serve has it on 8000, and gRPC on 50051"
GOES_ON: Final = (
    "the batch goes on without you; the same command comes back to it, --cancel ends it"
)
OVER: Final = ("completed", "failed", "expired", "cancelled")
# What is read of answers.
FILE: Final = {"id": str}
BATCH: Final = {
    "id": str,
    "status": str,
    "request_counts": {"total": int, "completed": int, "failed": int},
    "input_file_id": str,
    "output_file_id": str | None,
    "error_file_id": str | None,
    "errors": dict | None,
}


class BatchError(Exception):
    """Why a batch cannot go on, for its user."""


class Away(BatchError):
    """Nobody answers, or nobody who has room, for too long."""


class Refused(BatchError):
    """The gateway's own no."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What the next run of the same command must know, kept beside the file until the end."""

    url: str
    digest: str
    file_id: str
    # Names the batch before it is there.
    key: str

    def write(self, path: Path) -> None:
        """All of it or nothing."""
        _write(path, json.dumps(asdict(self)).encode())

    @classmethod
    def read(cls, path: Path) -> "Note | None":
        try:
            return cls(**json.loads(path.read_text()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise BatchError(f"{path} cannot be read ({error}): delete it to begin anew") from error


@dataclass(frozen=True, slots=True)
class Files:
    """Of one batch: what is asked, what comes of it, and the note in between."""

    lines: Path

    @property
    def note(self) -> Path:
        return self.lines.parent / f"{self.lines.name}.batch"

    @property
    def output(self) -> Path:
        return self.lines.with_suffix(".output.jsonl")

    @property
    def errors(self) -> Path:
        return self.lines.with_suffix(".errors.jsonl")


class Server:
    """The HTTP API, asked again while it is away or says that it has too much to do."""

    def __init__(self, url: str, api_key: str | None, tls: TLS | None) -> None:
        key = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(
            base_url=url,
            headers=key,
            timeout=httpx.Timeout(60.0, connect=5.0),
            verify=verifier(url, tls),
            trust_env=False,
        )
        self._has_answered = False

    def close(self) -> None:
        self._http.close()

    def told(self, method: str, path: str, form: object, **more: Any) -> dict[str, Any]:
        """An answer of JSON. BatchError: as `ask`, or somebody else answers there."""
        answer = self.ask(method, path, **more)
        try:
            found = answer.json()
        except (ValueError, RecursionError):
            found = None
        if not _is_like(found, form):
            raise BatchError(f"{answer.url} does not answer as a gateway does")
        return dict(found)

    def ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        """BatchError: it says no; or nothing, or that it has no room, for too long."""
        failures, since_s = 0, time.monotonic()
        while True:
            failures += 1
            wait_s = doubled_s(0.2, failures, WAIT_S_MAX)
            try:
                answer = self._http.request(method, path, **more)
            # The second: of a name that no host can have.
            except (httpx.HTTPError, UnicodeError) as error:
                if untrusted := certificate_problem(str(error)):
                    raise BatchError(untrusted) from error
                problem = f"{self._http.base_url} does not answer: {error or type(error).__name__}"
                if not self._has_answered:
                    is_other = isinstance(error, httpx.RemoteProtocolError)
                    hint = NO_HTTP if is_other else START_ONE
                    raise Away(f"{problem}\n{hint}") from error
            else:
                self._has_answered = True
                if answer.headers.get("x-should-retry") != "true":
                    return _checked(answer)
                problem, wait_s = _said(answer), max(wait_s, _retry_after_s(answer))
            if time.monotonic() + wait_s - since_s > AWAY_S:
                raise Away(problem)
            time.sleep(wait_s)


def batch(url: str, tls: TLS | None, path: Path, *, api_key: str | None, cancels: bool) -> int:
    """The exit code: 1 when a line has no answer. `url`: also as SDKs of OpenAI's want it."""
    url = url.rstrip("/").removesuffix("/v1")
    files = Files(Path(expanduser(path)))
    try:
        alone = nullcontext() if cancels else _alone(files.lines)
        with alone, closing(Server(url, api_key, tls)) as server:
            if cancels and not files.note.exists():
                raise BatchError(f"no batch of {files.lines} was begun: there is no {files.note}")
            found = _begun(server, url, files)
            if cancels and found["status"] not in OVER:
                found = server.told("POST", f"/v1/batches/{found['id']}/cancel", BATCH)
            ended = _followed(server, found)
            return _told(server, ended, files)
    except (BatchError, OSError, httpx.InvalidURL) as error:
        _out().print(Text(harmless(f"error: {error}"), style="red"), soft_wrap=True)
        if isinstance(error, Away) and files.note.exists():
            _out().print(GOES_ON, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        if files.note.exists():
            _out().print(GOES_ON, soft_wrap=True)
        raise


def _out() -> Console:
    """Whether or not somebody reads how it goes, the answers are to be written."""
    return console(is_unfailing=True)


@contextmanager
def _alone(lines: Path) -> Iterator[None]:
    """BatchError: another command follows these lines; of two each would begin a batch."""
    try:
        opened = lines.open("rb")
    except OSError as error:
        raise BatchError(f"{lines}: {error.strerror}") from error
    with opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            rule = "wait for it, or end it and run this again"
            raise BatchError(f"another kaiten batch follows {lines}: {rule}") from None
        except OSError:
            # Not every file can be held so.
            pass
        yield


def _begun(server: Server, url: str, files: Files) -> dict[str, Any]:
    """The batch of these lines: the one that was begun before, or a new one."""
    try:
        content = files.lines.read_bytes()
    except OSError as error:
        raise BatchError(f"{files.lines}: {error.strerror}") from error
    endpoint, digest = _endpoint(content), hashlib.sha256(content).hexdigest()
    note = Note.read(files.note)
    if note is None:
        upload = {"file": (files.lines.name, content)}
        file = server.told("POST", "/v1/files", FILE, files=upload, data={"purpose": "batch"})
        note = Note(url=url, digest=digest, key=secrets.token_hex(16), file_id=file["id"])
        try:
            note.write(files.note)
        except BatchError:
            _forget(server, file["id"], files)
            raise
    elif (note.url, note.digest) != (url, digest):
        other = f"at {note.url}" if note.url != url else "with other lines"
        raise BatchError(f"{files.note} is of a batch {other}: delete it to begin anew")
    asked = {"input_file_id": note.file_id, "endpoint": endpoint, "completion_window": "24h"}
    headers = {"idempotency-key": note.key}
    try:
        return server.told("POST", "/v1/batches", BATCH, json=asked, headers=headers)
    except Refused as error:
        # What it finds wrong was not begun. Who lacks a key, say, may come back with it.
        if error.status == httpx.codes.BAD_REQUEST:
            if _is_gone(server, note.file_id):
                hint = f"was it begun with another key? Else delete {files.note} to begin anew"
                raise BatchError(f"{error}\n{hint}") from error
            _forget(server, note.file_id, files)
        raise


def _is_gone(server: Server, file_id: str) -> bool:
    """It is kept no more, or another tenant's."""
    try:
        server.ask("GET", f"/v1/files/{file_id}")
    except Refused as error:
        return error.status == httpx.codes.NOT_FOUND
    return False


def _endpoint(content: bytes) -> str:
    """Of the first line: a batch has one. The gateway says what is wrong with the others."""
    lines = content.removeprefix(BOM_UTF8).splitlines()
    first = next((line for line in lines if line.strip()), b"")
    try:
        return str(json.loads(first)["url"])
    except (ValueError, KeyError, TypeError, RecursionError):
        form = '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {…}}'
        raise BatchError(f"the first line is no request; a line is {form}") from None


def _followed(server: Server, found: dict[str, Any]) -> dict[str, Any]:
    """The batch when it is over."""
    with _bar() as show:
        while True:
            show(found)
            if found["status"] in OVER:
                return found
            time.sleep(LOOK_S)
            found = server.told("GET", f"/v1/batches/{found['id']}", BATCH)


@contextmanager
def _bar() -> Iterator[Callable[[dict[str, Any]], None]]:
    """A bar where somebody looks, else a line per state."""
    out, told = _out(), ""
    if not out.is_terminal:

        def say(found: dict[str, Any]) -> None:
            nonlocal told
            if found["status"] != told:
                told = found["status"]
                out.print(f"{found['id']}: {told}", soft_wrap=True, highlight=False)

        yield say
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed"),
        TimeRemainingColumn(),
        console=out,
    ) as bar:
        task = bar.add_task("", total=None, failed=0)

        def show(found: dict[str, Any]) -> None:
            counts = found["request_counts"]
            bar.update(
                task,
                description=found["status"],
                total=counts["total"] or None,
                completed=counts["completed"] + counts["failed"],
                failed=counts["failed"],
            )

        yield show


def _told(server: Server, ended: dict[str, Any], files: Files) -> int:
    """Write what came of it, say so, and forget the batch."""
    for file_id, path in (
        (ended["output_file_id"], files.output),
        (ended["error_file_id"], files.errors),
    ):
        if file_id is None:
            path.unlink(missing_ok=True)
        else:
            _write(path, _content(server, file_id, files))
    counts, told = ended["request_counts"], Text()
    told.append(f"{ended['status']}: {counts['completed']} of {counts['total']} lines answered")
    if files.output.exists():
        told.append(f"\nanswers: {files.output}")
    if files.errors.exists():
        told.append(f"\n{counts['failed']} not answered, and why: {files.errors}")
    for problem in (ended["errors"] or {}).get("data", ()):
        told.append(harmless(f"\n{problem['message']}"))
    _out().print(told, soft_wrap=True)
    _forget(server, ended["input_file_id"], files)
    return 0 if counts["completed"] == counts["total"] > 0 else 1


def _content(server: Server, file_id: str, files: Files) -> bytes:
    try:
        return server.ask("GET", f"/v1/files/{file_id}/content").content
    except Refused as error:
        hint = f"\ndelete {files.note} to begin anew"
        raise BatchError(
            f"{error}{hint if error.status == httpx.codes.NOT_FOUND else ''}"
        ) from error


def _forget(server: Server, file_id: str, files: Files) -> None:
    """Nobody comes back to it, and what was uploaded would take its tenant's room for days."""
    files.note.unlink(missing_ok=True)
    with suppress(BatchError):
        server.ask("DELETE", f"/v1/files/{file_id}")


def _write(path: Path, content: bytes) -> None:
    """All of it or nothing: what was there stays until then."""
    beside = path.with_name(f"{path.name}.new")
    try:
        beside.write_bytes(content)
        beside.replace(path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink()
        raise BatchError(f"{path} cannot be written: {error.strerror}") from error


def _is_like(found: object, form: Any) -> bool:
    """Whether it has all of that: by name what is of which type."""
    if not isinstance(form, dict):
        return isinstance(found, form)
    return isinstance(found, dict) and all(
        _is_like(found.get(name), each) for name, each in form.items()
    )


def _checked(answer: httpx.Response) -> httpx.Response:
    if answer.is_success:
        return answer
    hint = f"\n{HOW_TO_GIVE}" if answer.status_code == httpx.codes.UNAUTHORIZED else ""
    raise Refused(f"{_said(answer)}{hint}", answer.status_code)


def _retry_after_s(answer: httpx.Response) -> float:
    """Whole seconds, as a gateway says it; 0: it does not, or somebody between says a date."""
    said = answer.headers.get("retry-after", "")
    return float(said) if re.fullmatch(r"[0-9]{1,6}", said) else 0.0


def _said(answer: httpx.Response) -> str:
    """Its own words; those of somebody between may be a page."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {answer.status_code} of {answer.url}"
