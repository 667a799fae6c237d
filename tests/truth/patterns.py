"""All patterns by name, in the order of their answers and of what they show, whichever kind was imported first."""

from __future__ import annotations

from tests.truth import ended, not_exact, pattern, right

KINDS = (right, not_exact, ended)  # each adds its own to pattern.PATTERNS
_ANSWERS = ("yes", "not known", "no", "lost", "refused", "error")
PATTERNS = dict(sorted(pattern.PATTERNS.items(), key=lambda item: (_ANSWERS.index(item[1].answer.split(" or ")[0]), item[1].what)))
