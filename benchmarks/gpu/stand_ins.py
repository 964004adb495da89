"""What services import and these figures do not need: something in its place where it is missing.

A machine that is lent for an hour has torch and little else. Nobody calls what stands in, but for
structlog, which says nothing.
"""

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

REPLACED: Final = ("hiredis", "redis", "structlog")


def stand_in() -> None:
    """From now on imports of what is missing succeed."""
    missing = tuple(name for name in REPLACED if importlib.util.find_spec(name) is None)
    sys.meta_path.append(_Finder(missing))


class _Finder(MetaPathFinder, Loader):
    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in self._names:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Missing(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Named(type):
    """A class whose names are classes, too: a module may be imported as a name of its package."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (Exception,), {"__module__": cls.__module__})


class _Missing(ModuleType):
    """Its names are classes: to derive from, to name in annotations, to catch."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "get_logger":
            return _Silent
        return _Named(name, (Exception,), {"__module__": self.__name__})


class _Silent:
    def __getattr__(self, name: str) -> Any:
        return lambda *words, **named: None
