"""A module of the project with the name of one of Python's own."""


def name() -> str:
    return "the project's"
