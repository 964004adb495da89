"""Programs for users, run in this process."""

from collections.abc import Mapping

from openai import OpenAI


def close_clients(names: Mapping[str, object]) -> None:
    """Those that a program held until its process's end. A class or function in its names makes
    a circle of them, and the collector would complain of the socket in another's test.
    """
    for each in names.values():
        if isinstance(each, OpenAI):
            each.close()
