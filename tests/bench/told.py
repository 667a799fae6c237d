"""Sentences of README and docs/benchmarks.md that tell measured figures: `python -m tests.bench.tables` writes them anew.

They stand between `<!-- told: NAME -->` and `<!-- end of told -->`. Every figure comes from a table of results/.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable

Median = Callable[
    [str, str, str, str], str
]  # table, beginning of a line, its second cell, column -> a figure with its unit

_WALL = "wall clock"
_MANY = 200  # tensors


def _number(figure: str) -> float:
    return float(figure.partition(" ")[0])


def _short(value: float) -> str:
    """Two digits that count."""
    return f"{float(f'{value:.2g}'):g}"


def _overhead(median: Median) -> tuple[float, float]:
    """Microseconds that are fixed, and for each tensor."""
    fixed, tensor = (median("step_cost", f"a: 1 rank, of that {what}", _WALL, "cost") for what in ("fixed", "for each"))
    return _number(fixed), _number(tensor)


def _formula(median: Median) -> str:
    fixed, tensor = _overhead(median)
    return f"`{_short(fixed)} µs + {_short(tensor)} µs × parameter tensors`"


def _longer(median: Median, row: str) -> str:
    percent = 100 * (_number(median("step_cost", f"{row}: ", _WALL, "cost")) - 1)
    return f"{percent:.1f} % longer" if percent >= 0.05 else "no longer"


def _step(median: Median, row: str) -> str:
    return _length(_number(median("step_cost", f"{row}: ", _WALL, "torchrun")))


def _length(ms: float) -> str:
    return f"{ms / 1e3:.1f} s" if ms >= 1000 else f"{ms:.0f} ms"


def _wrapped(text: str) -> str:
    """Lines of a page; code stays on one."""
    whole = re.sub("`[^`]*`", lambda code: code[0].replace(" ", "\0"), " ".join(text.split()))
    return textwrap.fill(whole, 138, break_long_words=False, break_on_hyphens=False).replace("\0", " ") + "\n"


def readme(median: Median) -> str:
    """What a step costs while nothing fails, in a sentence."""
    return _wrapped(
        f"""While nothing fails, a step of {_step(median, "b")} takes {_longer(median, "b")} than under torchrun (a GPT of 10.6 M parameters
        on two ranks), and ftrun adds about {_formula(median)} to any. [All figures, and how they were measured](docs/benchmarks.md)."""
    )


def cost(median: Median) -> str:
    """The answer to: what does it cost me?"""
    fixed, tensor = _overhead(median)
    many = (fixed + tensor * _MANY) / 1e3
    rest = "of that, without the step that is done again"
    stall, torchrun = (median("stall", "model built above", rest, column) for column in ("ftrun", "torchrun"))
    spare = median("footprint", "`ftrun spare", "", "ftrun").partition(" +")[0]
    return _wrapped(
        f"""While nothing fails, a step takes about {_formula(median)} longer than under torchrun: {_short(many)} ms for a model of {_MANY}
        tensors, so {_short(many / 10)} % of a step of one second, and {_short(many / 0.2)} % of one of 20 ms. That is one rank.
        Two ranks on two cores take {_longer(median, "b")} for a step of {_step(median, "b")} (a GPT of 10.6 M parameters). Ranks that share
        a core also wait for each other at the gate: the same model as four ranks on two cores takes {_longer(median, "d")}
        for a step of {_step(median, "d")}. A death costs `one step + {stall}` with a warm spare, where torchrun takes
        {_length(_number(torchrun))} to start again and then repeats half a checkpoint interval. The spare is one more process with torch
        and your model in it: {spare} of its own here. On a GPU nothing was measured yet. The tables below have all figures with their
        ranges."""
    )


SENTENCES: dict[str, Callable[[Median], str]] = {"readme": readme, "cost": cost}
