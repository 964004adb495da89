"""Why the stack cannot start, and what to do about it."""

from pathlib import Path


class StartError(Exception):
    """The stack cannot start: `cause` says why, `fix` what to do about it."""

    def __init__(self, cause: str, fix: str = "") -> None:
        super().__init__(f"{cause}\n{fix}".strip())
        self.cause = cause
        self.fix = fix


def expanded(path: Path) -> Path:
    """With a home in place of `~`. StartError: there is none."""
    try:
        return path.expanduser()
    except RuntimeError:
        raise StartError(f"{path}: nobody here has this home folder", "write it out") from None
