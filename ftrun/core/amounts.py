"""How amounts are written for people: counts, times, bytes."""

from __future__ import annotations


def count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")


def milliseconds(value: float) -> str:
    return f"{value:.1f}" if value < 2 else f"{value:.0f}"


def seconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def size(number: int) -> str:
    value, unit = float(number), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
