"""`ftrun completions SHELL`: prints the completion file, for installations that have no `completions/` folder."""

from __future__ import annotations

import typer

from ftrun.cli.main import app


@app.command(
    "completions",
    help="Print the completion file of a shell.",
    epilog='Example: eval "$(ftrun completions bash)"  (in ~/.bashrc; for zsh and fish see the first lines of what is printed)',
)
def completions(shell: str = typer.Argument(..., metavar="bash|zsh|fish", help="The shell.")) -> int:
    from ftrun.cli.completion import printed

    printed(shell)
    return 0
