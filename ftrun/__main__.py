"""Where `ftrun` and `python -m ftrun` start: a Ctrl-C that comes during the imports ends them without a traceback."""

from __future__ import annotations

import sys

from ftrun.core.errors import EXIT_SIGNAL


def main() -> None:
    """Run the command line and exit with its code."""
    try:
        from ftrun.cli.main import main as command

        command()
    except KeyboardInterrupt:
        sys.exit(EXIT_SIGNAL + 2)


if __name__ == "__main__":
    main()
