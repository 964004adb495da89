"""`python -m kaiten` is the `kaiten` command."""

from kaiten.cli import main

if __name__ == "__main__":
    main()
