"""The errors of a `TaskGroup`, for who wants one of them."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def first_alone(kind: type[Exception]) -> Iterator[None]:
    """Raise the first error of this kind in place of its group; a group without one as it is.

    No `except*`: before Python 3.11.4 what is raised there is a group again.
    """
    try:
        yield
    except ExceptionGroup as group:
        found = group.subgroup(kind)
        if found is None:
            raise
        raise found.exceptions[0] from None
