"""Every accepted request is counted once, however it ends, over a worker's death."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest

from kaiten.v1 import inference_service_pb2 as pb
from kaiten.v1.common_pb2 import SamplingParams
from kaiten.v1.inference_service_pb2_grpc import InferenceServiceStub
from tests.support.processes import HELD_WORKER
from tests.support.whole_stack import WAIT_S, WholeStack, wait_until

pytest.importorskip("opentelemetry.exporter.prometheus", reason="kaiten[metrics] is not installed")
from tests.support.metric_pages import Scrape, scrape

ASK = {"model": "mini", "prompt": "The chef", "temperature": 0}
REQUESTS = "kaiten_requests_total"
ENDED = "kaiten_request_success_total"
# Of steps: behind a first sentence.
HELD_FROM = 150


class Cell(WholeStack):
    """With a page at every process."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, worker_module=HELD_WORKER)
        self.door.process.argv.append("--metrics-tenants")
        self.pages = dict[str, str]()
        for process in (self.scheduler, self.worker):
            port = self.hold_port()
            self.pages[process.name] = f"http://{port.address}"
            process.argv += ["--metrics-port", str(port.number)]

    def scheduler_says(self) -> Scrape:
        return scrape(self.pages["scheduler"])

    def gateway_says(self) -> Scrape:
        return scrape(self.door.http)


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    with Cell(tmp_path_factory.mktemp("metrics")) as running:
        yield running


def complete(cell: Cell, **changes: object) -> httpx.Response:
    return httpx.post(f"{cell.door.openai}/completions", json={**ASK, **changes}, timeout=WAIT_S)


async def abandon(cell: Cell, count: int, *, after_tokens: bool) -> None:
    """Streams whose clients leave, before or after a first token."""
    async with grpc.aio.insecure_channel(cell.door.grpc) as channel:
        stub = InferenceServiceStub(channel)

        async def visit() -> None:
            request = pb.GenerateRequest(text="The chef", sampling=endless())
            call = stub.Generate(request, timeout=WAIT_S)
            async for response in call:
                if response.event.HasField("delta") or not after_tokens:
                    break
            call.cancel()

        await asyncio.gather(*(visit() for _ in range(count)))


def endless(tokens: int = 1000) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=1)


def balance(page: Scrape) -> tuple[float, float]:
    """What came in, and where it went."""
    gone = page(ENDED) + page("kaiten_requests_handed_over_total") + page("kaiten_requests_live")
    return page(REQUESTS), gone


def settled(cell: Cell) -> Scrape:
    # Before the scheduler has heard of a request nothing of it is live, either.
    wait_until(lambda: not cell.problem(), "an idle cell")
    wait_until(lambda: cell.scheduler_says()("kaiten_requests_live") == 0, "nothing is live")
    wait_until(lambda: cell.gateway_says()("kaiten_gateway_requests_live") == 0, "nobody follows")
    return cell.scheduler_says()


def test_finished_cancelled_refused_and_left_are_counted_exactly(cell: Cell) -> None:
    before, door_before = settled(cell), cell.gateway_says()
    for _ in range(3):
        assert complete(cell, max_tokens=5, ignore_eos=True).status_code == 200
    assert complete(cell, max_tokens=0).status_code == 400
    # Far from their own end when the gateway has found the stop string, or their client has gone.
    with cell.held(HELD_FROM):
        assert complete(cell, max_tokens=1000, stop=["."], ignore_eos=True).status_code == 200
        asyncio.run(abandon(cell, 4, after_tokens=True))
        asyncio.run(abandon(cell, 2, after_tokens=False))
        wait_until(lambda: cell.scheduler_says()(ENDED) == before(ENDED) + 10, "all have ended")
    page, door = settled(cell), cell.gateway_says()

    def more(name: str, **labels: str) -> float:
        return page(name, **labels) - before(name, **labels)

    def door_more(name: str, **labels: str) -> float:
        return door(f"kaiten_gateway_{name}", **labels) - door_before(
            f"kaiten_gateway_{name}", **labels
        )

    assert more(REQUESTS, origin="new") == 10
    assert more(ENDED, finished_reason="length") == 3
    assert more(ENDED, finished_reason="stop") == 1
    assert more(ENDED, finished_reason="cancelled") == 6
    assert more(ENDED) == 10
    assert balance(page)[0] == balance(page)[1]
    # Whoever left had tokens computed for it: 15 of those who stayed, and some more.
    assert more("kaiten_generation_tokens_total") > 15 + 4
    assert more("kaiten_e2e_request_latency_seconds_count") == 10
    assert more("vllm:e2e_request_latency_seconds_count", model_name="checkpoint") == 10
    # A stop string is found by the gateway, which has the rest cancelled.
    assert more("kaiten_abort_to_free_seconds_count") == 6 + 1
    assert door_more("requests_accepted_total", origin="new", tenant="default") == 10
    assert door_more("requests_ended_total", outcome="left") == 6
    assert door_more("requests_ended_total") == 10
    assert door_more("requests_refused_total", code="INVALID_ARGUMENT") == 1
    first = "gen_ai_server_time_to_first_token_seconds_count"
    assert 8 <= door(first) - door_before(first) <= 10


def test_a_request_past_its_deadline_is_an_end_of_its_own(cell: Cell) -> None:
    before = settled(cell)

    async def run_late() -> None:
        async with grpc.aio.insecure_channel(cell.door.grpc) as channel:
            request = pb.GenerateRequest(text="The chef", sampling=endless())
            with pytest.raises(grpc.aio.AioRpcError):
                async for _ in InferenceServiceStub(channel).Generate(request, timeout=0.05):
                    pass

    asyncio.run(run_late())
    page = settled(cell)
    # If it was refused in time there is nothing to count; what was accepted ended.
    assert balance(page)[0] == balance(page)[1]
    taken = page(REQUESTS) - before(REQUESTS)
    late = {"deadline_exceeded", "cancelled"}
    assert taken == sum(
        page(ENDED, finished_reason=r) - before(ENDED, finished_reason=r) for r in late
    )


def test_who_is_cancelled_before_a_token_is_counted_so_over_both_doors(cell: Cell) -> None:
    """HTTP tells it as an error; it is no fault of the gateway's or the store's all the same."""
    settled(cell)
    before = cell.gateway_says()

    async def story() -> None:
        async with (
            httpx.AsyncClient(timeout=WAIT_S) as http,
            grpc.aio.insecure_channel(cell.door.grpc) as channel,
        ):
            stub = InferenceServiceStub(channel)

            async def over_http(id: str, **changes: object) -> None:
                body = {**ASK, "max_tokens": 1000, "ignore_eos": True, **changes}
                url, headers = f"{cell.door.openai}/completions", {"Idempotency-Key": id}
                assert "cancelled" in (await http.post(url, json=body, headers=headers)).text

            async def over_grpc(id: str) -> None:
                request = pb.GenerateRequest(request_id=id, text="The chef", sampling=endless())
                async for _ in stub.Generate(request, timeout=WAIT_S):
                    pass

            def are_live() -> bool:
                return cell.gateway_says()("kaiten_gateway_requests_live") == 3

            with cell.held():
                asked = [over_http("a"), over_http("b", stream=True), over_grpc("c")]
                ended = asyncio.gather(*asked)
                await asyncio.to_thread(wait_until, are_live, "all are live")
                for id in "abc":
                    assert (await stub.Cancel(pb.CancelRequest(request_id=id))).was_live
                await ended
            for id in "abc":
                told = await http.get(f"{cell.door.openai}/requests/{id}/explain")
                assert told.json()["choices"][0]["latency_ms"], "what its client waited is known"

    asyncio.run(story())
    settled(cell)
    now = cell.gateway_says()

    def more(name: str, **labels: str) -> float:
        return now(name, **labels) - before(name, **labels)

    assert more("kaiten_gateway_requests_ended_total", outcome="cancelled") == 3
    assert more("kaiten_gateway_requests_ended_total") == 3
    durations = "gen_ai_server_request_duration_seconds_count"
    assert more(durations, error_type="cancelled") == more(durations) == 3
    assert more("gen_ai_server_time_to_first_token_seconds_count") == 0


def test_the_books_balance_over_a_killed_worker(cell: Cell) -> None:
    before = settled(cell)

    async def story() -> None:
        async with grpc.aio.insecure_channel(cell.door.grpc) as channel:
            stub = InferenceServiceStub(channel)
            has_begun = asyncio.Event()

            async def visit() -> int:
                tokens = 0
                request = pb.GenerateRequest(text="The chef", sampling=endless(150))
                async for response in stub.Generate(request, timeout=WAIT_S):
                    tokens += response.event.delta.token_count
                    has_begun.set()
                return tokens

            visits = [asyncio.create_task(visit()) for _ in range(5)]
            await has_begun.wait()
            await asyncio.to_thread(cell.worker.kill)
            cell.worker.start()
            assert await asyncio.gather(*visits) == [150] * 5

    asyncio.run(story())
    lost = "kaiten_workers_lost_total"
    wait_until(lambda: scrape(cell.pages["scheduler"])(lost, how="crash"), "the crash is known")
    page = settled(cell)
    assert page(REQUESTS) - before(REQUESTS) == 5
    assert page(ENDED, finished_reason="length") - before(ENDED, finished_reason="length") == 5
    # Each token once, though some were computed twice.
    tokens = "kaiten_generation_tokens_total"
    assert page(tokens) - before(tokens) == 5 * 150
    assert page(lost, how="disconnect") >= 1
    assert balance(page)[0] == balance(page)[1]


def test_every_page_says_what_metrics_md_says(cell: Cell) -> None:
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    pages = [scrape(url) for url in (cell.door.http, *cell.pages.values())]
    for page in pages:
        assert page.names()
        for name in (name for name in page.names() if not name.startswith("vllm:")):
            bare = re.sub("_(bucket|count|sum|created)$", "", name)
            assert re.search(f"`{bare}[`{{]", text), f"{bare} is not in metrics.md"
    assert pages[1]("kaiten_is_leader") == 1
    assert pages[1]("kaiten_num_workers") == 1
    assert pages[2]("kaiten_worker_steps_total") > 0
    is_registered = "kaiten_worker_is_registered"
    wait_until(lambda: scrape(cell.pages["worker"])(is_registered), "it is registered")


def test_where_time_goes_and_how_full_a_worker_is(cell: Cell) -> None:
    settled(cell)
    address = cell.worker_address
    pages = list[Scrape]()

    def is_seen() -> bool:
        pages.append(cell.scheduler_says())
        # Of up to a second ago, when it may have had its slot and nothing yet that was computed.
        return pages[-1]("kaiten_worker_kv_tokens", worker=address) > 0

    async def story() -> None:
        async with grpc.aio.insecure_channel(cell.door.grpc) as channel:
            request = pb.GenerateRequest(text="The chef", sampling=endless())
            # Once a second is looked: it is in the batch until it was seen there.
            with cell.held(HELD_FROM):
                call = InferenceServiceStub(channel).Generate(request, timeout=WAIT_S)
                async for response in call:
                    if response.event.HasField("delta"):
                        break
                await asyncio.to_thread(wait_until, is_seen, "a row in a batch")
                call.cancel()

    asyncio.run(story())
    busy = pages[-1]
    # Of up to a second ago, when others may have run.
    assert 1 <= busy("kaiten_worker_slots_used", worker=address) <= 16
    assert busy("kaiten_worker_slots", worker=address) == 16
    places = busy("kaiten_worker_kv_places_held", worker=address)
    assert 0 < busy("kaiten_worker_kv_tokens", worker=address) <= places
    page = settled(cell)
    for part in ("plan", "book", "send", "forward", "commit"):
        assert page("kaiten_iteration_time_seconds_total", part=part) > 0, part
    used = page("kaiten_budget_tokens_used_total")
    assert 0 < used < page("kaiten_budget_tokens_total")
    assert page("kaiten_passed_over_total", stage="plan") > 0
    # All there was to do one worker did.
    assert page("kaiten_worker_budget_tokens_used_total", worker=address) == used
    assert page("kaiten_worker_passed_over_total", worker=address) > 0
    assert page("kaiten_worker_prefix_hit_tokens_total", worker=address) >= 0
    assert page("kaiten_leader_changes_total") == 1
    # Of up to a second ago, too: when the request may just have come.
    forecast = "kaiten_queue_time_forecast_seconds"
    wait_until(lambda: cell.scheduler_says()(forecast) == 0, "nobody to wait for")
    worker = scrape(cell.pages["worker"])
    memory = "kaiten_worker_device_memory_bytes"
    assert 0 < worker(memory, state="used") < worker(memory, state="total")
    assert 0 <= worker("kaiten_worker_device_busy") <= 1
