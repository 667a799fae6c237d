"""Plain values of a script that ftrun keeps with its steps: the values of `job.state`."""

from __future__ import annotations

from typing import Any


class PlainValues:
    """Holds its values as attributes, which the script reads and writes."""

    def __init__(self, values: dict[str, Any]) -> None:
        vars(self).update(values)

    def __getattr__(self, name: str) -> Any:
        known = ", ".join(vars(self)) or "nothing"
        raise AttributeError(f"job.state has no {name}; it was made with {known}")

    def __repr__(self) -> str:
        return f"job.state({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def state_dict(self) -> dict[str, Any]:
        """Return the values by name."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the values that `state_dict` returned."""
        vars(self).clear()
        vars(self).update(state)


class GlobalVariables:
    """Global variables of a script, which stay where they are."""

    def __init__(self, space: dict[str, Any], names: tuple[str, ...]) -> None:
        self._space = space
        self.names = frozenset(names)

    def state_dict(self) -> dict[str, Any]:
        """Return the values of the existing variables by name."""
        return {name: self._space[name] for name in sorted(self.names) if name in self._space}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Assign the values that `state_dict` returned."""
        self._space.update(state)
