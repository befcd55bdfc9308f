"""The evaluation on real recordings in the place of generated ones: what is right must come out right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("av", reason="needs keepstep[voice]")

from voice.recordings import recordings
from voice.whisper import whisper_base  # noqa: F401  a fixture

TEXTS = 4


@pytest.fixture(scope="module")
def folder(speech: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As infer.py leaves it, but lj herself speaks for the fine-tuned voice, kathleen with other words for the base."""
    from audio import load_audio, write_wav
    from rows import write_rows

    folder = tmp_path_factory.mktemp("evaluation").resolve()
    lj, kathleen = recordings(speech, "lj"), recordings(speech, "kathleen")
    rows = []
    for number in range(TEXTS):
        path, text = lj[3 + number]
        row: dict[str, Any] = {"id": f"{number + 1:04}", "text": text, "language": "english", "source": str(path)}
        for system, source in (("base", kathleen[number][0]), ("fine_tuned", path), ("real", path)):
            row[system] = str(folder / system / f"{row['id']}.wav")
            write_wav(row[system], load_audio(source))
        rows.append(row | {"seconds": {"base": 2.0, "fine_tuned": 4.0}, "cut": {"base": number == 0}})
    write_rows(folder / "generated.jsonl", rows)
    write_rows(folder / "held_out.jsonl", [{"audio": str(p), "text": t, "speaker": "lj"} for p, t in lj[3:11]])
    others = ("kathleen", "an4-fcaw", "an4-mjwl")
    write_rows(
        folder / "others.jsonl",
        [
            {"audio": str(p), "speaker": who}
            for who in others
            for p, _ in recordings(speech, who)[20:26] or recordings(speech, who)[:6]
        ],
    )
    return folder


def evaluate(folder: Path, *flags: str) -> dict[str, Any]:
    import evaluate

    evaluate.main(["--evaluation-dir", str(folder), "--skip", "dnsmos", *flags])
    found: dict[str, Any] = json.loads((folder / "comparison_results.json").read_text())
    return found


def test_the_right_voice_and_words_win(
    folder: Path,
    whisper_base: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = evaluate(
        folder,
        *("--real", str(folder / "held_out.jsonl"), "--other-speakers", str(folder / "others.jsonl")),
        *("--asr-model", str(whisper_base)),
    )
    base, tuned, real = (found["systems"][system] for system in ("base", "fine_tuned", "real"))
    assert found["speaker"] == "lj"
    assert (tuned["rank"], tuned["first"]) == (1, TEXTS)
    assert (base["rank"] > 1, base["first"], base["nearest"]) == (True, 0, "kathleen")
    assert tuned["similarity"]["low"] > base["similarity"]["high"]
    assert base["similarity"]["mean"] < found["bands"]["same_speaker"]["from"]
    assert tuned["similarity"]["mean"] > found["bands"]["different_speakers"]["to"]
    assert tuned["wer"]["mean"] < 0.15
    assert base["wer"]["mean"] > 0.8
    assert real["wer"]["n"] == TEXTS
    # The real recordings are among those compared with: none may count for itself.
    assert real["similarity"]["mean"] < tuned["similarity"]["mean"]
    assert tuned["duration_ratio"]["mean"] == pytest.approx(1.0, abs=0.01)
    assert tuned["real_time_factor"]["mean"] == pytest.approx(
        4.0 * TEXTS / sum(file["fine_tuned"]["duration_s"] for file in found["files"])
    )
    assert base["cut"] == 1
    assert found["left_out"] == {"dnsmos": "left out by --skip"}
    printed = capsys.readouterr().out
    assert "fine-tuned is closer to lj than base" in printed
    assert "lj ranks first (4 of 4" in printed
    assert "fine-tuned is understood better than base" in printed
    assert "1 of 4 base recordings did not end by themselves" in printed
    assert (folder / "index.html").is_file()
    assert not any(Path(file["base"]["audio"]).is_absolute() for file in found["files"])


def test_a_column_that_can_not_be_had_is_left_out_with_the_reason(folder: Path, tmp_path: Path) -> None:
    found = evaluate(folder, "--asr-model", str(tmp_path), "--speaker", "lj")
    assert "no model.bin" in found["left_out"]["wer"]
    assert found["systems"]["fine_tuned"]["wer"] is None
    assert found["systems"]["fine_tuned"]["similarity"]["n"] == TEXTS
    assert found["bands"]["different_speakers"] is None
    assert any("wer was left out" in line for line in found["verdict"])


def test_without_real_recordings_there_is_no_similarity_but_the_rest(folder: Path, tmp_path: Path) -> None:
    from rows import read_rows, write_rows

    rows = read_rows(folder / "generated.jsonl", needed=("id",))
    write_rows(
        tmp_path / "generated.jsonl", [{k: v for k, v in row.items() if k not in ("real", "source")} for row in rows]
    )
    found = evaluate(tmp_path, "--skip", "wer", "dnsmos")
    assert "give recordings" in found["left_out"]["similarity"]
    assert found["systems"]["real"]["num_files"] == 0
    assert found["systems"]["base"]["real_time_factor"]["n"] == TEXTS
    assert (tmp_path / "index.html").is_file()


def test_other_real_recordings_are_the_ceiling_where_the_texts_have_none(folder: Path, tmp_path: Path) -> None:
    from rows import read_rows, write_rows

    rows = read_rows(folder / "generated.jsonl", needed=("id",))
    write_rows(
        tmp_path / "generated.jsonl", [{k: v for k, v in row.items() if k not in ("real", "source")} for row in rows]
    )
    found = evaluate(tmp_path, "--real", str(folder / "held_out.jsonl"), "--skip", "wer", "dnsmos")
    assert found["systems"]["real"]["num_files"] == len(found["other_real_files"]) == 8
    # Each is compared with the others, not with itself.
    assert found["systems"]["real"]["similarity"]["mean"] == pytest.approx(found["bands"]["same_speaker"]["mean"])
    assert {file["fine_tuned"]["duration_basis"] for file in found["files"]} == {"pace"}


def test_a_recording_that_can_not_be_read_or_scored_is_named_and_the_others_count(folder: Path, tmp_path: Path) -> None:
    import numpy as np
    from audio import write_wav
    from rows import read_rows, write_rows

    rows = read_rows(folder / "generated.jsonl", needed=("id",))
    rows[0]["fine_tuned"], rows[1]["fine_tuned"] = str(tmp_path / "torn.wav"), str(tmp_path / "silent.wav")
    (tmp_path / "torn.wav").write_bytes(b"RIFF....")
    write_wav(tmp_path / "silent.wav", np.zeros(24_000, np.float32))
    write_rows(tmp_path / "generated.jsonl", rows)
    found = evaluate(tmp_path, "--speaker", "lj", "--skip", "wer", "dnsmos")
    assert "can't be read" in found["files"][0]["fine_tuned"]["missing"]["audio"]
    assert found["files"][1]["fine_tuned"]["missing"] == {"similarity": "it is silent"}
    assert found["systems"]["fine_tuned"]["similarity"]["n"] == TEXTS - 2
    assert "it is silent" in (tmp_path / "index.html").read_text()


def test_a_folder_that_was_sent_elsewhere_has_its_own_real_recordings(folder: Path, tmp_path: Path) -> None:
    import shutil

    from rows import read_rows, write_rows

    sent = tmp_path / "sent"
    shutil.copytree(folder, sent)
    rows = read_rows(sent / "generated.jsonl", needed=("id",))
    write_rows(sent / "generated.jsonl", [row | {"source": f"/gone/{row['id']}.flac"} for row in rows])
    found = evaluate(sent, "--speaker", "lj", "--skip", "wer", "dnsmos")
    assert found["compared_with"] == {"lj": TEXTS} and found["not_compared_with"] == []
    assert found["systems"]["real"]["similarity"]["n"] == TEXTS
    # None of them counts for itself, whether it is known by the copy's name or by the original's.
    assert found["systems"]["real"]["similarity"]["mean"] == pytest.approx(found["bands"]["same_speaker"]["mean"])


def test_a_bad_recording_among_real_ones_costs_itself_alone(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from rows import read_rows, write_rows

    rows = read_rows(folder / "held_out.jsonl")
    rows[0]["audio"], rows[1]["audio"] = str(tmp_path / "torn.wav"), str(tmp_path / "gone.wav")
    (tmp_path / "torn.wav").write_bytes(b"RIFF....")
    write_rows(tmp_path / "real.jsonl", rows)
    for skipped in (["wer", "dnsmos"], ["similarity", "wer", "dnsmos"]):
        found = evaluate(folder, "--real", str(tmp_path / "real.jsonl"), "--skip", *skipped)
        assert [Path(one["audio"]).name for one in found["not_compared_with"]] == ["torn.wav", "gone.wav"]
        assert found["compared_with"] == {"lj": len(rows) - 2}
        assert found["characters_per_second"] > 0
        printed = capsys.readouterr().out
        assert "torn.wav of lj: " in printed and "gone.wav is not a file" in printed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--real", "others.jsonl"], "several speakers"),
        (["--real", "others.jsonl", "--speaker", "anna"], "no recordings of anna; it has an4-fcaw"),
        (["--real", "nowhere.jsonl"], "not there"),
    ],
)
def test_a_wrong_set_of_recordings_is_one_line(folder: Path, flags: list[str], message: str) -> None:
    import evaluate

    flags = [str(folder / flag) if flag.endswith(".jsonl") else flag for flag in flags]
    with pytest.raises(SystemExit, match=message):
        evaluate.main(["--evaluation-dir", str(folder), *flags])


def test_the_reference_is_not_among_what_is_compared_with(tmp_path: Path) -> None:
    from real_recordings import target_rows
    from rows import write_rows

    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.wav").touch()
    given = [
        {"audio": str(tmp_path / f"{name}.wav"), "speaker": who}
        for name, who in zip("abc", ("Anna", "anna", "bob"), strict=True)
    ]
    write_rows(tmp_path / "real.jsonl", given)
    settings = {"speaker": "anna", "ref_audio": str(tmp_path / "a.wav")}
    target, real = target_rows(tmp_path / "real.jsonl", None, [], settings)
    assert target == "anna"
    assert [Path(row["audio"]).name for row in real] == ["b.wav"]
    # Nor where the texts' own recordings are compared with, of which it may be one.
    rows = [{"text": n, "source": str(tmp_path / f"{n}.wav"), "real": f"/copies/{n}.wav"} for n in "ab"]
    target, real = target_rows(None, None, rows, settings)
    assert (target, [row["audio"] for row in real]) == ("anna", ["/copies/b.wav"])


def test_recordings_are_spread_over_all() -> None:
    from real_recordings import spread

    rows = [{"audio": str(number)} for number in range(100)]
    assert [row["audio"] for row in spread(rows, 4)] == ["0", "25", "50", "75"]
    assert spread(rows[:3], 4) == rows[:3]


# ---- what is claimed


def results(base: tuple[float, ...], tuned: tuple[float, ...], key: str = "similarity") -> dict[str, Any]:
    def summary(values: tuple[float, ...]) -> dict[str, Any]:
        return dict(zip(("mean", "low", "high"), values, strict=True), n=12)

    return {
        "speaker": "anna",
        "systems": {
            "base": {key: summary(base), "num_files": 12, "cut": 0},
            "fine_tuned": {key: summary(tuned), "num_files": 12, "cut": 0},
            "real": {"num_files": 0, "cut": 0},
        },
        "bands": {"same_speaker": None, "different_speakers": None},
        "differences": {},
        "compared_with": {"anna": 8},
        "left_out": {},
    }


@pytest.mark.parametrize(
    ("key", "base", "tuned", "claim"),
    [
        ("similarity", (0.61, 0.58, 0.64), (0.86, 0.84, 0.88), "fine-tuned is closer to anna than base"),
        ("similarity", (0.86, 0.84, 0.88), (0.61, 0.58, 0.64), "base is closer to anna than fine-tuned"),
        ("similarity", (0.84, 0.80, 0.87), (0.86, 0.84, 0.88), "no difference shown"),
        ("wer", (0.40, 0.35, 0.45), (0.10, 0.05, 0.15), "fine-tuned is understood better than base"),
        (
            "wer",
            (0.10, 0.05, 0.15),
            (0.40, 0.35, 0.45),
            "base is understood better than fine-tuned: WER 0.10",
        ),
        ("wer", (0.10, 0.05, 0.15), (0.12, 0.06, 0.20), "no difference shown"),
    ],
)
def test_a_difference_is_claimed_only_if_it_was_shown(key: str, base: Any, tuned: Any, claim: str) -> None:
    from verdict import table, verdict

    given = results(base, tuned, key)
    assert verdict(given)[0].startswith(claim)
    assert f"{tuned[0]:.2f} [{tuned[1]:.2f}, {tuned[2]:.2f}]" in table(given)


def test_a_difference_text_by_text_is_told_where_intervals_overlap() -> None:
    from verdict import verdict

    given = results((0.84, 0.80, 0.87), (0.86, 0.84, 0.88))
    given["differences"]["similarity"] = {"n": 12, "mean": 0.02, "low": 0.01, "high": 0.03}
    assert "though text by text it is +0.02 [+0.01, +0.03]" in verdict(given)[0]
    given["differences"]["similarity"] = {"n": 12, "mean": 0.02, "low": -0.01, "high": 0.03}
    assert "text by text" not in verdict(given)[0]
