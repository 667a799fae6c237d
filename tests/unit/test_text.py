"""What a terminal would obey is spelled out."""

from __future__ import annotations

import json
import unicodedata

import pytest

from ftrun.core import text


def test_nothing_that_a_terminal_obeys_is_left() -> None:
    every = "".join(map(chr, range(0x30000)))
    left = text.printable(every)
    assert not [c for c in left if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")]
    assert not [
        c for c in left if unicodedata.bidirectional(c) in ("LRE", "RLE", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI")
    ]
    left.encode()


def test_words_stay_as_they_are() -> None:
    for words in ("rank 2 died → spare 4 (é, 漢字, 👩\u200d💻, no\u00a0break)", "C:\\new", ""):
        assert text.printable(words) == words


def test_what_is_spelled_out_and_json_stays_json() -> None:
    assert text.printable("a\nftrun: b\x1b[2J\x9b") == "a\\nftrun: b\\u001b[2J\\u009b"
    hostile = "\x1b]0;t\x07\x7f\x9b\u202e\ud800\n"
    assert json.loads(text.printable(json.dumps(hostile, ensure_ascii=False))) == hostile
    assert text.page("one\x1b\ntwo\r\n") == "one\\u001b\ntwo\\r\n"


def test_a_sentence_of_ours_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    text.tell("error: no run named x\nftrun: recovered\x1b[1A")
    assert capsys.readouterr().err == "ftrun: error: no run named x\\nftrun: recovered\\u001b[1A\n"
