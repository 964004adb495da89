"""A scheduler in a process of its own leads a paced device over gRPC, message for message."""

from benchmarks.gpu.across_grpc import served
from benchmarks.gpu.crowd import jobs_uniform
from benchmarks.gpu.models import QWEN3_06B
from benchmarks.serving.distance import PacedDevice


async def test_a_crowd_is_led_from_another_process() -> None:
    jobs = jobs_uniform(3, 4, 8, QWEN3_06B.vocab)
    said = await served(PacedDevice(QWEN3_06B), jobs, delay_ms=1)
    assert said["tokens"] == sum(job.output for job in jobs)
