"""Text as it is spoken."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("written", "spoken"),
    [
        ("In being comparatively modern.", "in being comparatively modern"),
        ("Don\u2019t \u201cstop\u201d, twenty-five!", "dont stop twenty five"),
        ("On May 3rd, 1850", "on may third eighteen fifty"),
        ("1900, 1906 and 2,000,001", "nineteen hundred nineteen oh six and two million one"),
        ("the 21st, 12th and 40th", "the twenty first twelfth and fortieth"),
        ("3.14% of $1,250", "three point one four percent of one thousand two hundred fifty dollars"),
        ("Mr. Miller & Dr. Smith", "mister miller and doctor smith"),
        ("01524", "zero one five two four"),
        ("\u4f60\u597d\uff0c\u4e16\u754c", "\u4f60 \u597d \u4e16 \u754c"),
        ("Caf\u00e9", "caf\u00e9"),
        ("...", ""),
    ],
)
def test_spoken_form(written: str, spoken: str) -> None:
    from spoken import spoken_form

    assert spoken_form(written) == spoken


def test_the_spoken_form_of_a_spoken_form_is_itself() -> None:
    from spoken import spoken_form

    once = spoken_form("On May 3rd, 1850, Messrs. Miller & Richard paid \u00a320.50")
    assert spoken_form(once) == once


def test_what_differs_is_counted_and_marked() -> None:
    from spoken import compare

    errors = compare("The quick brown fox, it jumps.", "oh the quack brown fox jumps")
    assert errors.num_words == 6
    assert errors.num_word_errors == 3
    assert errors.wer == 0.5
    assert [mark for mark in errors.marks if mark[0] != "equal"] == [
        ("insert", "", "oh"),
        ("substitute", "quick", "quack"),
        ("delete", "it", ""),
    ]


def test_joined_words_are_no_errors_of_characters() -> None:
    from spoken import compare

    errors = compare("block books", "blockbooks")
    assert errors.wer == 1.0
    assert errors.cer == 0.0


def test_nothing_heard_is_all_wrong_and_nothing_to_say_is_refused() -> None:
    from spoken import compare

    assert compare("hello there", "").wer == 1.0
    with pytest.raises(ValueError, match="no words"):
        compare("?!", "hello")
