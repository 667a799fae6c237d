"""The README says on what ftrun was seen to work, and not more."""

from tests.gpu.machine import ROOT

SENTENCE = "CPU so far; GPU paths are tested against a fake driver."


def test_the_first_paragraph_says_whether_a_gpu_was_tried() -> None:
    """The sentence stands there exactly as long as there are no figures from a GPU."""
    paragraphs = (ROOT / "README.md").read_text().split("\n\n")
    first = " ".join(next(text for text in paragraphs if not text.startswith("#")).split())
    tried = (ROOT / "tests/bench/results/gpu.md").exists()
    assert (SENTENCE in first) != tried, "tests/bench/results/gpu.md and the README's first paragraph disagree"
