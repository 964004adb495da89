"""Why the stack cannot start, and what to do about it."""


class StartError(Exception):
    """The stack cannot start: `cause` says why, `fix` what to do about it."""

    def __init__(self, cause: str, fix: str = "") -> None:
        super().__init__(f"{cause}\n{fix}".strip())
        self.cause = cause
        self.fix = fix
