"""Entry point of the worker process."""

from collections.abc import Sequence

import structlog

from gpu_worker.service import runtime
from gpu_worker.settings import WorkerSettings
from service_kit import lifecycle, logs
from service_kit.settings import describe
from service_kit.settings import load as load_settings

log = structlog.get_logger()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a worker until it is told to stop. Returns the exit code."""
    return lifecycle.launch(lambda: _build(argv))


def _build(argv: Sequence[str] | None) -> lifecycle.Service:
    settings = load_settings(WorkerSettings, "worker", argv)
    logs.configure("worker", settings.log_level)
    log.info("service.settings", **describe(settings))
    runtime.prepare()
    runtime.take_short_turns()
    runtime.leave_out_the_compiler()
    # Torch takes seconds to import: wrong settings and --help need not wait for it.
    from gpu_worker.service.loading import load
    from gpu_worker.service.process import WorkerProcess

    return WorkerProcess(settings, load)
