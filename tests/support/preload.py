"""Imported by the server that services are forked from, before the first fork.

Python's garbage collector writes into every object that it looks at, and whoever writes into a page
that came by a fork copies it. What is there before the first fork it never looks at: otherwise a
start costs twice as much.
"""

import gc
from importlib import import_module
from typing import Final

from gateway.settings import GatewaySettings
from gpu_worker.service import runtime
from gpu_worker.settings import WorkerSettings
from scheduler_svc.settings import SchedulerSettings
from tests.support import quick_flags
from tests.support.processes import GATEWAY, MOCK_WORKER, SCHEDULER, WORKER

# And what each imports a moment later: a worker with its first plan, a gateway for its metrics.
LATER: Final = (
    "gpu_worker.batch.grammar_masks",
    "gpu_worker.service.loading",
    "numpy.ma",
    "opentelemetry.exporter.prometheus",
    "pydantic.type_adapter",
    "service_kit.metric_aliases",
    "uvicorn.lifespan.off",
)
# And commands, each of which imports its own.
COMMANDS: Final = (
    "kaiten.bench.command",
    "kaiten.cli.app",
    "kaiten.cli.batch",
    "kaiten.cli.chat.command",
    "kaiten.cli.live.explain",
    "kaiten.cli.generate",
    "kaiten.cli.live.watch",
)
MODULES: Final = (*COMMANDS, SCHEDULER, GATEWAY, MOCK_WORKER, WORKER, *LATER)

gc.disable()
# As a worker's process begins.
runtime.leave_out_the_compiler()
for module in MODULES:
    import_module(module)
quick_flags.install(
    {
        SchedulerSettings: "scheduler",
        GatewaySettings: "gateway",
        WorkerSettings: "worker",
        import_module(MOCK_WORKER).MockSettings: "worker",
    }
)
gc.freeze()
gc.enable()
