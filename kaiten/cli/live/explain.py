"""`kaiten explain`: where the time of a request went, as a waterfall."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import grpc
from google.protobuf.json_format import MessageToJson, Parse

from kaiten.cli import packages
from kaiten.cli.complaint import complain
from kaiten.cli.live.cell_view import full_name_of
from kaiten.client.connection import OPTIONS, with_key
from kaiten.client.errors import ApiError, NotFoundError, from_rpc_error
from kaiten.client.live_core import LiveCore
from kaiten.local import services
from kaiten.tls import TLS
from kaiten.tls import channel as channel_to
from kaiten.v1.inference_service_pb2 import ExplainRequest, ExplainResponse
from kaiten.v1.inference_service_pb2_grpc import InferenceServiceStub
from kaiten.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from kaiten.v1.timeline_pb2 import ChoiceTimeline, TimelineInterval, TimelinePhase
from kaiten.v1.watch_pb2 import WatchRequest

# What the leader does not know is looked up in archives, by the scheduler's --replay-s.
CALL_S: Final = 660.0
LOOK_S: Final = 5.0
# What the HTTP API writes before a request's id. An id that a gRPC client chose may begin so, too.
PREFIXES: Final = ("chatcmpl-", "cmpl-", "resp_")
# Of a gateway without keys.
DEFAULT_TENANT: Final = "default"
# What a replay ends with that has read all of the archives.
NOT_FOUND: Final = 1
# Of the past: no worker of it is here.
NOBODY: Final = LiveCore()
# Of a watch: refused or away, or over before it has said anything.
UNTOLD: Final = (grpc.RpcError, StopIteration)
BAR: Final = 32
MATES_SHOWN_MAX: Final = 8
# Of more intervals, sums come first: the longest so many.
SUMMED_MIN: Final = 8
SUMS_MAX: Final = 4
PHASES: Final[Mapping[int, str]] = {
    TimelinePhase.TIMELINE_PHASE_QUEUE: "queue",
    TimelinePhase.TIMELINE_PHASE_PREFILL: "prefill",
    TimelinePhase.TIMELINE_PHASE_DECODE: "decode",
    TimelinePhase.TIMELINE_PHASE_STALL: "stall",
    TimelinePhase.TIMELINE_PHASE_ACCEPT: "accept",
    TimelinePhase.TIMELINE_PHASE_COMMIT: "commit",
    TimelinePhase.TIMELINE_PHASE_DELIVER: "deliver",
    TimelinePhase.TIMELINE_PHASE_READER: "reader",
}
MARKS: Final = {
    "accept": "▏",
    "queue": "·",
    "prefill": "▒",
    "decode": "█",
    "stall": "!",
    "commit": "=",
    "deliver": "▏",
    "reader": "~",
    "unknown": "?",
}


def explain(
    address: str,
    tls: TLS | None,
    request_id: str,
    *,
    tenant: str,
    api_key: str | None,
    as_json: bool,
) -> int:
    """Print it; the exit code."""
    try:
        response = asked(address, tls, request_id, tenant, api_key)
    except NotFoundError as error:
        code = complain(error, address)
        hint = from_archive(request_id, tenant)
        sys.stderr.write(f"an archive that was not asked may know of it: {hint}\n")
        return code
    except ApiError as error:
        return complain(error, address)
    core = LiveCore() if as_json else _cell(address, tls, api_key, response)
    more = hints(request_id, tenant, response)
    _show(request_id, response, as_json=as_json, more=more, core=core)
    return 0


def _cell(
    address: str, tls: TLS | None, api_key: str | None, response: ExplainResponse
) -> LiveCore:
    """Whose workers have names, where the response has ids of them: it has for operators, who may
    watch. Empty: nobody tells of it now."""
    core = LiveCore()
    ids = {each.worker_id for choice in response.choices for each in choice.intervals}
    if any(ids):
        with channel_to(address, tls or False, OPTIONS) as channel, suppress(*UNTOLD):
            method, metadata = SchedulerServiceStub(channel).Watch, with_key((), api_key)
            core.take(next(method(WatchRequest(), timeout=LOOK_S, metadata=metadata)))
    return core


def _show(
    request_id: str,
    response: ExplainResponse,
    *,
    as_json: bool,
    more: Sequence[str] = (),
    core: LiveCore = NOBODY,
) -> None:
    if as_json:
        text = MessageToJson(response, indent=None, preserving_proto_field_name=True)
        sys.stdout.write(text + "\n")
    else:
        named = partial(full_name_of, core)
        lines = [line for each in response.choices for line in lines_of(request_id, each, named)]
        sys.stdout.write("\n".join([*lines, *more]) + "\n")


def hints(request_id: str, tenant: str, response: ExplainResponse) -> list[str]:
    """Where to ask for what the cell does not know any more."""
    intervals = [interval for choice in response.choices for interval in choice.intervals]
    unknown = TimelinePhase.TIMELINE_PHASE_UNKNOWN
    if not any(interval.phase == unknown for interval in intervals):
        return []
    return [f"what is unknown the archive may know: {from_archive(request_id, tenant)}"]


def from_archive(request_id: str, tenant: str) -> str:
    """What to call."""
    whose = f" --tenant {tenant}" if tenant else ""
    return f"kaiten explain {request_id}{whose} --archive .kaiten"


def explain_archived(
    archives: Sequence[str],
    request_id: str,
    tenant: str,
    api_key_file: Path | None,
    *,
    until: str = "",
    as_json: bool,
) -> int:
    """By archives, long after and under however many leaders; the exit code. Folders are named as
    they are, all else is an address. `until`: the newest of this id that was accepted before.
    """
    packages.require("scheduler")
    if missing := next((each for each in archives if _is_missing(each)), None):
        sys.stderr.write(f"{missing}: no such folder\n")
        return 2
    flags = [] if api_key_file is None else ["--api-key-file", str(api_key_file)]
    flags += ["--until", until] if until else []
    done = _replayed(archives, request_id, tenant, flags)
    # Not of an id that it was not: that it is not there would be half of the truth.
    sys.stderr.write(done.stderr)
    if done.returncode == 0:
        _show(request_id, Parse(done.stdout, ExplainResponse()), as_json=as_json)
    return done.returncode


def _is_missing(archive: str) -> bool:
    """An address has a port, or begins with unix:."""
    return ":" not in archive and not Path(archive).is_dir()


def _replayed(
    archives: Sequence[str], request_id: str, tenant: str, flags: Sequence[str]
) -> subprocess.CompletedProcess[str]:
    """By the id as answers carry it, or as it is; what the last of these said."""
    command = [*services.command(services.REPLAY), "explain", *flags]
    folders = [name for name in archives if Path(name).is_dir()]
    for name in archives:
        command += [] if name in folders else ["--address", name]
    bare = [request_id.removeprefix(p) for p in PREFIXES if request_id.startswith(p)]
    for id in (request_id, *bare):
        asked_for = [*command, f"{tenant or DEFAULT_TENANT}:{id}", *folders]
        environ = os.environ | services.environ()
        done = subprocess.run(asked_for, capture_output=True, text=True, env=environ)
        if done.returncode != NOT_FOUND:
            break
    return done


def asked(
    address: str, tls: TLS | None, request_id: str, tenant: str, api_key: str | None
) -> ExplainResponse:
    """By the id as answers carry it, or as it is. ApiError: it is not known, or nobody answers."""
    request = ExplainRequest(request_id=request_id, tenant=tenant)
    with channel_to(address, tls or False, OPTIONS) as channel:
        try:
            method, metadata = InferenceServiceStub(channel).Explain, with_key((), api_key)
            found: ExplainResponse = method(request, timeout=CALL_S, metadata=metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
    return found


def lines_of(
    request_id: str, choice: ChoiceTimeline, named: Callable[[str], str] = str
) -> Iterator[str]:
    """A heading, and a line for each interval. `named`: what a worker of this id is called."""
    intervals = choice.intervals
    if not intervals:
        yield f"{request_id}  nothing is known of it yet"
        return
    start_ns, end_ns = intervals[0].start_unix_ns, intervals[-1].end_unix_ns
    name = f"{request_id}  choice {choice.choice}" if choice.choice else request_id
    ended = f"ended: {choice.ended}" if choice.ended else "not ended"
    yield f"{name}  {_ms(end_ns - start_ns)} ms, {ended}"
    if len(intervals) > SUMMED_MIN:
        yield f"  {', '.join(_sums(intervals))}"
    yield f"{'at ms':>10} {'for ms':>10}  {'':{BAR}}".rstrip()
    for interval in intervals:
        at, length = interval.start_unix_ns - start_ns, _length(interval)
        bar = _bar(interval, start_ns, max(1, end_ns - start_ns))
        words = f"{phase_of(interval):8} {'; '.join(_words(interval, named))}".rstrip()
        yield f"{_ms(at):>10} {_ms(length):>10}  {bar}  {words}"
    if choice.num_batch_mates:
        yield _mates(choice)


def _mates(choice: ChoiceTimeline) -> str:
    """Whose requests had a slot beside it, for operators; for others how many."""
    count, ids = choice.num_batch_mates, list(choice.batch_mate_ids[:MATES_SHOWN_MAX])
    more = ["…"] * (bool(ids) and len(ids) < count)
    names = f": {', '.join([*ids, *more])}" if ids else ""
    return f"{'':{10 + 1 + 10}}  in a batch with {count} other request{'s' * (count > 1)}{names}"


def _sums(intervals: Iterable[TimelineInterval]) -> Iterator[str]:
    """Where most of it went, whenever that was."""
    sums = Counter[str]()
    for interval in intervals:
        why = f" ({interval.why})" if interval.why else ""
        sums[f"{phase_of(interval)}{why}"] += _length(interval)
    for name, ns in sums.most_common(SUMS_MAX):
        yield f"{_ms(ns)} ms {name}"
    if rest := sums.total() - sum(ns for _, ns in sums.most_common(SUMS_MAX)):
        yield f"{_ms(rest)} ms otherwise"


def phase_of(interval: TimelineInterval) -> str:
    return PHASES.get(interval.phase, "unknown")


def _length(interval: TimelineInterval) -> int:
    return int(interval.end_unix_ns - interval.start_unix_ns)


def _ms(ns: int) -> str:
    return f"{ns / 1e6:,.1f}"


def _bar(interval: TimelineInterval, start_ns: int, total_ns: int) -> str:
    first = (interval.start_unix_ns - start_ns) * BAR // total_ns
    last = -(-(interval.end_unix_ns - start_ns) * BAR // total_ns)
    mark = MARKS[phase_of(interval)]
    return (" " * first + mark * (last - first)).ljust(BAR)


def _words(interval: TimelineInterval, named: Callable[[str], str]) -> Iterator[str]:
    if interval.why:
        yield interval.why
    if interval.HasField("stalled_by_sequence_id"):
        who = interval.stalled_by_id or f"sequence {interval.stalled_by_sequence_id}"
        yield f"that of {who}"
    if interval.HasField("behind_sequence_id"):
        who = interval.behind_id or f"sequence {interval.behind_sequence_id}"
        yield f"of {who}, which is before it"
    yield from _of_prompt(interval)
    yield from _of_steps(interval)
    if interval.batch_mates:
        yield f"beside {interval.batch_mates} other{'s' * (interval.batch_mates != 1)}"
    if interval.worker_id:
        yield f"on {named(interval.worker_id)}"


def _of_prompt(interval: TimelineInterval) -> Iterator[str]:
    if interval.chunk_tokens:
        chunks = interval.chunk_tokens
        tokens = f"{sum(chunks)} token{'s' * (sum(chunks) != 1)}"
        yield f"{tokens} in {len(chunks)} chunk{'s' * (len(chunks) > 1)}"
    if interval.num_cached_tokens:
        yield f"{interval.num_cached_tokens} tokens were cached"
    if interval.num_blocks:
        shared = f", {interval.num_shared_blocks} shared" if interval.num_shared_blocks else ""
        brought = interval.num_swapped_in_blocks
        shared += f", {brought} from host memory" if brought else ""
        yield f"{interval.num_blocks} block{'s' * (interval.num_blocks > 1)}{shared}"


def _of_steps(interval: TimelineInterval) -> Iterator[str]:
    if interval.gap_p50_ns:
        yield f"{interval.num_steps} steps, {_ms(interval.gap_p50_ns)} ms apart"
    for gap in interval.longest_gaps[:1]:
        prompts = f", {gap.prompt_tokens} prompt tokens" if gap.prompt_tokens else ""
        rows = "1 row" if gap.rows == 1 else f"{gap.rows} rows"
        yield f"{_ms(gap.gap_ns)} ms at most (a step of {rows}{prompts})"
