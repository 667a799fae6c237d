"""Formats counts, times and sizes for people."""

from __future__ import annotations


def count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")


def milliseconds(value: float) -> str:
    return f"{value:.1f}" if value < 2 else f"{value:.0f}"


def seconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def duration(value: float) -> str:
    """Format a run's length, given in seconds: `9.3 s`, `12 min 5 s`, `3 h 4 min`."""
    whole = round(value)
    if whole < 60:
        return seconds(value)
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


def size(number: int) -> str:
    value, unit = float(number), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"


def place(step: int | None, epoch: int | None, end: int) -> str:
    """Format a step's place in its run: `step 60`, or `epoch 3, step 8 of 40`. `end`: steps of the loop, 0 = not known."""
    return f"step {step}" if epoch is None else f"epoch {epoch}, step {step}" + (f" of {end}" if end else "")
