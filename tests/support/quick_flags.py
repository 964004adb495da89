"""What flags a settings class takes is found before services are forked, not in each of them.

    quick_flags.install({SchedulerSettings: "scheduler"})        once, in the server that forks

A process reads its flags once, into what was found for it; when it wants it again, as for `--help`,
it is found anew. The server reads some, too: what cyclopts then keeps of types and names serves
all.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, get_args

from cyclopts import App, ArgumentCollection

from service_kit.errors import ConfigError
from service_kit.settings import Settings, _app, load

SOME = ["--grpc-port", "1", "--log-level", "info"]


def install(services: Mapping[type[Settings], str]) -> None:
    assemble = App.assemble_argument_collection
    for model, name in services.items():
        # Whose model or scheduler must be given says so.
        with suppress(ConfigError):
            load(model, name, SOME, {})
    found = {model: assemble(_app(model, name, ())) for model, name in services.items()}

    def assembled(app: App, **options: Any) -> ArgumentCollection:
        taken = getattr(app.default_command, "__annotations__", {}).get("settings")
        model = next(iter(get_args(taken)), None)
        if not options and model in found:
            return found.pop(model)
        return assemble(app, **options)

    App.assemble_argument_collection = assembled  # type: ignore[method-assign,assignment]
