"""The `kaiten` command."""

import sys


def main() -> None:
    """Entry point of the console script; what it needs is imported when it runs."""
    if _is_healthy(sys.argv[1:]):
        return
    from kaiten.cli import app

    app.main()


def _is_healthy(words: list[str]) -> bool:
    """`kaiten healthcheck ADDRESS`, without TLS, of a part that serves: answered with no import of
    the command line's or gRPC's. For everything else False: the command itself says what is wrong.
    """
    import os

    if len(words) != 2 or words[0] != "healthcheck" or "://" in words[1]:
        return False
    if any(name.startswith("KAITEN_TLS") for name in os.environ):
        return False
    from kaiten.probe import says_serving

    if says_serving(words[1]):
        print(f"{words[1]} serving")
        return True
    return False
