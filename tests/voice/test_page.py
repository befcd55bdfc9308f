"""The page of an evaluation: whole, in one piece, and safe with any text."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest

pytest.importorskip("av", reason="needs keepstep[voice]")

UNSAFE = """<script>alert("a & b's")</script>"""


def summary(mean: float) -> dict[str, Any]:
    return {"n": 2, "mean": mean, "low": mean - 0.02, "high": mean + 0.02}


def recording(audio: str, similarity: float, **more: Any) -> dict[str, Any]:
    marks = [["equal", "the", "the"], ["substitute", "quick", UNSAFE], ["delete", "fox", ""], ["insert", "", "oh"]]
    scores = {"similarity": similarity, "rank": 1, "nearest": "anna", "wer": 0.5, "dnsmos": 3.1, "marks": marks}
    return {"audio": audio, "missing": {}, "duration_s": 1.0, **scores, **more}


@pytest.fixture
def results(tmp_path: Path) -> dict[str, Any]:
    from audio import write_wav

    tone = np.sin(np.arange(24_000) / 8).astype(np.float32) / 2
    for path in ("base/0001.wav", "fine_tuned/0001.wav", "fine_tuned/00 2.wav"):
        write_wav(tmp_path / "evaluation" / path, tone)
    write_wav(tmp_path / "elsewhere.wav", tone[:12_000])
    elsewhere = str(tmp_path / "elsewhere.wav")
    files = [
        {
            "id": "0001",
            "text": UNSAFE,
            "base": recording("base/0001.wav", 0.6, rank=3, nearest=UNSAFE, cut=True),
            "fine_tuned": recording("fine_tuned/0001.wav", 0.9, duration_ratio=1.25),
            "real": recording(elsewhere, 0.95),
        },
        {"id": "0002", "text": "Second.", "fine_tuned": recording("fine_tuned/00 2.wav", 0.8)},
    ]
    files[1]["base"] = {"audio": "base/0002.wav", "missing": {"audio": f"it is {UNSAFE}"}}
    system = {"similarity": summary(0.9), "wer": summary(0.5), "num_files": 2, "cut": 0, "rank": 1, "first": 2}
    return {
        "speaker": UNSAFE,
        "generation": {"base_model": UNSAFE, "seed": 0},
        "verdict": [f"fine-tuned is closer to {UNSAFE}"],
        "left_out": {},
        "compared_with": {"anna": 3, UNSAFE: 2},
        "bands": {
            "same_speaker": summary(0.9) | {"from": 0.85, "to": 0.95},
            "different_speakers": summary(0.6) | {"from": 0.5, "to": 0.7},
        },
        "systems": {
            "base": system,
            "fine_tuned": system,
            "real": {"num_files": 1, "cut": 0, "similarity": summary(0.95)},
        },
        "differences": {"similarity": summary(-0.1)},
        "files": files,
    }


class Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(path: Path) -> Reader:
    reader = Reader()
    reader.feed(path.read_text())
    assert not reader.open
    return reader


def test_a_page_links_every_recording_and_needs_nothing_else(tmp_path: Path, results: dict[str, Any]) -> None:
    from page import write_page

    path = write_page(tmp_path / "evaluation", results)
    page = read(path)
    players = [attrs["src"] or "" for tag, attrs in page.tags if tag == "audio"]
    assert players == [
        "base/0001.wav",
        "fine_tuned/0001.wav",
        "../elsewhere.wav",
        "base/0002.wav",
        "fine_tuned/00%202.wav",
    ]
    there = [(path.parent / unquote(player)).is_file() for player in players]
    assert there == [True, True, True, False, True]
    pictures = [attrs for tag, attrs in page.tags if tag == "img"]
    assert len(pictures) == 4
    assert all((picture["src"] or "").startswith("data:image/png;base64,iVBOR") for picture in pictures)
    # One scale of time within a text: half as long, half as wide.
    assert [picture["style"] for picture in pictures] == ["width:100.0%", "width:100.0%", "width:51.0%", "width:100.0%"]
    assert "http" not in path.read_text()
    assert str(tmp_path) not in path.read_text()


def test_no_text_is_taken_for_code(tmp_path: Path, results: dict[str, Any]) -> None:
    from page import write_page

    page = read(write_page(tmp_path / "evaluation", results))
    assert "script" not in {tag for tag, _ in page.tags}
    assert page.text.count(UNSAFE) >= 8


def test_a_page_shows_errors_bands_and_what_is_missing(tmp_path: Path, results: dict[str, Any]) -> None:
    from page import write_page

    path = write_page(tmp_path / "evaluation", results)
    page = read(path)
    content = path.read_text()
    assert "<s>fox</s>" in content and "<ins>oh</ins>" in content
    assert ("mark", {"title": "to be said: quick"}) in page.tags
    assert "audio: it is" in page.text
    assert "did not end by itself: cut" in page.text
    assert "no recording" in page.text
    assert "\u22120.10" in page.text
    # Four recordings have a similarity, each over two bands, and so has the chart of all.
    assert len(re.findall("#c9e6cf", content)) == len(re.findall("#dfe2e8", content)) == 5


def test_a_page_without_similarities_or_bands(tmp_path: Path, results: dict[str, Any]) -> None:
    from page import write_page

    results["bands"] = {"same_speaker": None, "different_speakers": None}
    for system in results["systems"].values():
        for name in ("similarity", "rank"):
            system.pop(name, None)
    for file in results["files"]:
        for system in ("base", "fine_tuned", "real"):
            file.get(system, {}).pop("similarity", None)
    page = read(write_page(tmp_path / "evaluation", results))
    assert "Whose voice" not in page.text


def test_a_recording_that_is_gone_since_it_was_scored_is_named(tmp_path: Path, results: dict[str, Any]) -> None:
    import page

    folder = tmp_path / "evaluation"
    (folder / "comparison_results.json").write_text(json.dumps(results))
    (folder / "fine_tuned" / "0001.wav").unlink()
    page.main([str(folder)])
    shown = read(folder / "index.html").text
    assert "audio: " in shown and "0001.wav is not a file" in shown
    # What was found when it was scored stays as it was said.
    assert f"audio: it is {UNSAFE}" in shown and "0002.wav is not a file" not in shown


def test_a_folder_without_results_is_one_line(tmp_path: Path) -> None:
    import page

    with pytest.raises(SystemExit, match=r"run evaluate\.py first"):
        page.main([str(tmp_path)])
