"""One log format for every process: JSON lines on stderr, coloured text when a person is looking.

Libraries that use the standard library's logging come out in the same format, from WARNING up.
"""

import logging
import sys
from contextlib import suppress
from typing import Final, TextIO

import structlog
from structlog.typing import Processor

from service_kit.errors import ConfigError

LEVELS: Final = ("debug", "info", "warning", "error")
SELDOM_S: Final = 60.0
SAID_MAX: Final = 256


class _Unfailing:
    """A stream as a log needs it: what it cannot take is lost, and whoever logged goes on. Else a
    full disk, or the end of who reads a pipe, ends every process at its next line.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


class _Seldom(logging.Filter):
    """What OpenTelemetry says of a collector it says once a minute, and not at each try: one may be
    away for days.
    """

    def __init__(self) -> None:
        super().__init__()
        # By what is said, of which signal, to where, and why.
        self._said_s: dict[tuple[str, ...], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith("opentelemetry."):
            return True
        args = record.args if isinstance(record.args, tuple) else ()
        key = (record.msg, *map(str, args[:3]))
        if record.created - self._said_s.get(key, 0.0) < SELDOM_S:
            return False
        if len(self._said_s) >= SAID_MAX:
            self._said_s.clear()
        self._said_s[key] = record.created
        return True


def configure(service: str, level: str = "info") -> None:
    """Set up structlog for this process. Called once, by the service's main."""
    if level not in LEVELS:
        raise ConfigError(f"log level {level!r} is unknown; choose one of {', '.join(LEVELS)}")
    shared = _shared_processors(service)
    structlog.configure(
        processors=[*shared, *_renderers()],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        logger_factory=structlog.WriteLoggerFactory(_Unfailing(sys.stderr)),  # type: ignore[arg-type]
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_Seldom())
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_renderers()],
        )
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)


def _shared_processors(service: str) -> list[Processor]:
    def add_service(
        _logger: object, _method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        event["service"] = service
        return event

    return [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        add_service,
    ]


def _renderers() -> list[Processor]:
    if sys.stderr.isatty():
        # rich's traceback, the default, shows every local: prompts, headers with keys in them.
        return [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
