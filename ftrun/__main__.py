"""Where `ftrun` and `python -m ftrun` start: a Ctrl-C that comes during the imports ends them without a traceback."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run the command line and exit with its code."""
    try:
        from ftrun.cli.main import main as command

        command()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
