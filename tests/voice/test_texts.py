"""Texts to say: what no language of the model writes is refused, and letters that may be said wrong are named."""

from __future__ import annotations

import pytest

pytest.importorskip("av", reason="needs keepstep[voice]")

CHINESE, JAPANESE, KOREAN = (
    "\u4f60\u597d\uff0c\u4e16\u754c",
    "\u30b3\u30fc\u30d2\u30fc\u3092\u4eba\u3005",
    "\uc548\ub155",
)
RUSSIAN, WIDE = "\u041f\u0440\u0438\u0432\u0435\u0442, \u0451\u043b\u043a\u0430", "\uff21\uff42"


@pytest.mark.parametrize(
    "text",
    [
        *("Good morning.", "Sm\u00f8rrebr\u00f8d", CHINESE, JAPANESE, KOREAN, RUSSIAN, WIDE, "42", " 1 "),
        "An angle \u03b1 of 5\u00b0",
        f"Salaam, \u0633\u0644\u0627\u0645, {CHINESE}",
    ],
)
def test_what_the_models_languages_write_is_taken(text: str) -> None:
    from texts import check_text

    assert check_text(text) == text.strip()


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("\u0645\u0631\u062d\u0628\u0627", "Arabic"),
        ("\u0928\u092e\u0938\u094d\u0924\u0947 P.", "Devanagari"),
        ("\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35", "Thai"),
        ("\u0393\u03b5\u03b9\u03ac \u03c3\u03bf\u03c5", "Greek"),
        ("\u05e9\u05dc\u05d5\u05dd, OK", "Hebrew"),
    ],
)
def test_what_none_of_them_writes_is_refused_by_its_script(text: str, script: str) -> None:
    from texts import check_text

    with pytest.raises(ValueError, match=rf"is written in {script} letters.*Chinese, English.*Italian") as raised:
        check_text(text)
    assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match=r"\.\.\.' is written in"):
        check_text(50 * text)


def test_letters_that_no_language_has_are_named_once() -> None:
    from texts import strange_letters

    told = strange_letters(["Wa\u0142\u0119sa", "\u0142", "\u0457\u0436\u0430\u043a"])
    assert "has the letters \u0119, \u0142, \u0457:" in told
    fine = "\u00dcbergr\u00f6\u00dfe, na\u00efve c\u0153ur, \u00f1and\u00fa, n\u00e3o, citt\u00e0, \u1e9e"
    assert strange_letters([fine, RUSSIAN, CHINESE, JAPANESE, KOREAN, WIDE, "\u03b1"]) == ""
