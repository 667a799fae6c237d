"""Another one: Python's own is imported by `random`, and so by torch."""


def middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
