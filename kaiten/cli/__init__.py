"""The `kaiten` command."""


def main() -> None:
    """Entry point of the console script; what it needs is imported when it runs."""
    from kaiten.cli import app

    app.main()
