"""The lesson's commands: each stage is a command line that the recipe's scripts take; all of them, on real speech."""

from __future__ import annotations

import importlib.util
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

LESSON = Path(__file__).parents[2] / "workshop" / "04-qwen3-tts-ft-ray"
RECIPE = Path(__file__).parents[2] / "recipes" / "qwen3_tts"
EVERY_FLAG = shlex.split(
    "--input-dir in --output-dir out --model-path model --num-workers 2 --batch-size 8 --learning-rate 1e-6 "
    "--num-epochs 3 --speaker-name Anna --transcripts t.csv --asr-model small --language English --strategy ddp "
    "--engine ray --precision bf16 --lora-rank 8 --device cpu --i-have-consent --consent-note form --texts texts.txt "
    "--other-speakers others"
)


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(LESSON / "src"))
    return importlib.import_module("stages")


@pytest.fixture
def pipeline(stages: ModuleType) -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_pipeline", LESSON / "scripts" / "run_pipeline.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def ran(stages: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that were started; none really is."""
    commands: list[list[str]] = []

    def call(command: list[str]) -> int:
        commands.append(command)
        return 0

    monkeypatch.setattr(stages.subprocess, "call", call)
    return commands


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the stages before leave, for two speakers."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "out"
    rows = [
        {"audio": f"segments/{who}/{n}.wav", "text": f"text {n}", "speaker": who, "ref_audio": f"segments/{who}/0.wav",
         "audio_codes": [[0] * 16] * (20 + n)} for who in ("anna", "ben") for n in range(2)
    ]  # fmt: skip
    folder.mkdir()
    (folder / "codes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def words_of(command: list[str], script: str) -> list[str]:
    """What stands after a script in a command."""
    (at,) = [number for number, word in enumerate(command) if Path(word).name == script]
    assert Path(command[at]).is_file()
    return command[at + 1 :]


def test_every_flag_is_one_that_the_scripts_take(pipeline: ModuleType, ran: list[list[str]], out: Path) -> None:
    import evaluate
    import infer
    import prepare
    import process
    import train

    pipeline.main(["--all", *EVERY_FLAG])
    assert len(ran) == 6
    processed = process.parse(words_of(ran[0], "process.py"))
    assert (processed.speaker_name, processed.num_workers, processed.i_have_consent) == ("Anna", 2, True)
    prepared = prepare.parse(words_of(ran[1], "prepare.py"))
    assert (prepared.segments, prepared.model_path, prepared.num_workers) == (Path("out/segments.jsonl"), "model", 2)
    trained = train.parse(words_of(ran[2], "train.py"))
    assert (trained.speaker, trained.num_epochs, trained.learning_rate, trained.lora_rank) == (["Anna"], 3, 1e-6, 8)
    assert trained.i_have_consent and trained.consent_note == "form"
    export = words_of(ran[3], "export.py")
    assert export == ["--run", "out/runs/anna", "--output", "out/voice-anna", "--model-path", "model", "--overwrite"]
    inferred = infer.parse(words_of(ran[4], "infer.py"))
    assert (inferred.speaker, inferred.texts) == ("anna", Path("texts.txt"))
    assert (inferred.ref_audio, inferred.ref_text) == (Path("out/segments/anna/0.wav"), "text 0")
    evaluated = evaluate.parse(words_of(ran[5], "evaluate.py"))
    assert (evaluated.asr_model, evaluated.other_speakers, evaluated.skip) == ("small", Path("others"), [])
    assert evaluated.device == "cpu"


def test_training_is_keepsteps(pipeline: ModuleType, ran: list[list[str]], out: Path) -> None:
    from keepstep.cli import main as keepstep

    pipeline.main(["--train", *EVERY_FLAG])
    words = ran[0][: [Path(word).name for word in ran[0]].index("train.py")]
    assert words[1:4] == ["-m", "keepstep", "run"]
    given = dict(zip(words[4::2], words[5::2], strict=True))
    assert given == {"--workers": "2", "--engine": "ray", "--strategy": "ddp", "--precision": "bf16", "--device": "cpu",
                     "--name": "anna", "--storage": "out/runs"}  # fmt: skip
    # keepstep knows them all: what it does not find is the script.
    assert keepstep([*words[3:], "no_such_script.py"]) == 2


def test_only_what_was_asked_for_runs_in_its_order(
    pipeline: ModuleType, ran: list[list[str]], out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline.main(["--prepare", "--process", "--input-dir", "in", "--output-dir", "out"])
    assert [Path(command[1]).name for command in ran] == ["process.py", "prepare.py"]
    printed = capsys.readouterr().out
    assert printed.startswith("stages: process, prepare\n") and "$ python " in printed
    assert "--i-have-consent" not in " ".join(ran[0])  # nobody says it for the user
    assert "--num-workers" not in " ".join(ran[0])
    with pytest.raises(SystemExit):
        pipeline.main(["--input-dir", "in"])
    assert "which stages?" in capsys.readouterr().err


def test_it_ends_with_the_first_that_fails_and_says_how_to_go_on(
    pipeline: ModuleType, stages: ModuleType, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    def call(command: list[str]) -> int:
        started.append(Path(command[1]).name)
        return 3 if "prepare.py" in started else 0

    monkeypatch.setattr(stages.subprocess, "call", call)
    with pytest.raises(SystemExit) as ended:
        pipeline.main(["--all", "--output-dir", "out"])
    assert started == ["process.py", "prepare.py"]
    assert "prepare failed: it ended with exit code 3" in str(ended.value)
    assert "--prepare --train --infer" in str(ended.value) and "--process" not in str(ended.value)


def test_every_speaker_is_compared_in_a_page_of_their_own(
    pipeline: ModuleType, ran: list[list[str]], out: Path
) -> None:
    pipeline.main(["--all", "--speaker-from", "folder", "--output-dir", "out"])
    assert words_of(ran[0], "process.py")[-4:-2] == ["--speaker-from", "folder"]
    compared = ran[4:]
    assert [Path(command[1]).name for command in compared] == ["infer.py", "evaluate.py"] * 2
    for speaker, (said, scored) in zip(("anna", "ben"), (compared[:2], compared[2:]), strict=True):
        words = words_of(said, "infer.py")
        assert words[words.index("--speaker") + 1] == speaker
        assert words[words.index("--ref-audio") + 1] == f"out/segments/{speaker}/0.wav"
        assert words[words.index("--voice") + 1] == "out/voice-voice"
        assert "--texts" not in words  # those that the voice remembers
        assert words[words.index("--output-dir") + 1] == f"out/evaluation/{speaker}"
        assert scored[scored.index("--evaluation-dir") + 1] == f"out/evaluation/{speaker}"
        assert "--skip wer" in " ".join(scored)  # without a model to hear with


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--infer", "--speaker-name", "carl", "--texts", "t.txt"], "no rows of carl"),
        (["--train", "--batch-size", "4", "--output-dir", "empty"], "run --prepare first"),
    ],
)
def test_what_a_stage_lacks_is_said(
    pipeline: ModuleType, ran: list[list[str]], out: Path, words: list[str], said: str
) -> None:
    with pytest.raises(SystemExit, match=said):
        pipeline.main(["--output-dir", "out", *words])
    assert ran == []


def test_a_step_has_room_for_the_longest(stages: ModuleType, out: Path) -> None:
    assert stages.batch_frames(out / "codes.jsonl", None) is None
    longest = 21 + 1
    assert stages.batch_frames(out / "codes.jsonl", 1) == longest
    assert stages.batch_frames(out / "codes.jsonl", 8) == pytest.approx(8 * 21, abs=8)


@pytest.mark.parametrize("name", ["data_processing", "prepare_data", "train_qwen_tts", "inference"])
def test_each_stage_has_a_script_of_its_own(name: str) -> None:
    done = subprocess.run(
        [sys.executable, str(LESSON / "src" / f"{name}.py"), "--help"], capture_output=True, text=True, check=True
    )
    for flag in ("--input-dir", "--output-dir", "--model-path", "--num-workers", "--speaker-name"):
        assert flag in done.stdout


def test_cloning_is_the_recipes_own() -> None:
    helps = [
        subprocess.run([sys.executable, str(path), "--help"], capture_output=True, text=True, check=True).stdout
        for path in (LESSON / "scripts" / "zero_shot_clone.py", RECIPE / "zero_shot_clone.py")
    ]
    assert helps[0] == helps[1] and "--ref-audio" in helps[0]


def test_the_lesson_is_listed_and_can_be_taken_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from keepstep.cli import main as keepstep

    assert keepstep(["workshop"]) == 0
    assert "  4  Voice cloning" in capsys.readouterr().out
    assert keepstep(["workshop", "4", "--folder", str(tmp_path)]) == 0
    assert (tmp_path / LESSON.name / "scripts" / "run_pipeline.py").is_file()
    assert keepstep(["workshop", "4", "--check", "--folder", str(tmp_path)]) == 1


def run_pipeline(folder: Path, model: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(LESSON / "scripts" / "run_pipeline.py"), *words, "--input-dir", "recordings",
               "--transcripts", "recordings.csv", "--model-path", str(model), "--speaker-name", "Lin", "--num-epochs",
               "1", "--batch-size", "4", "--learning-rate", "1e-4", "--device", "cpu", "--i-have-consent"]  # fmt: skip
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_the_whole_on_real_speech(tmp_path: Path, tiny_model: Path, speech: Path) -> None:
    (tmp_path / "recordings").mkdir()
    lines = (speech / "metadata.csv").read_text().splitlines()
    wanted = [line for line in lines if line.startswith("lj/")][:6]
    for line in wanted:
        shutil.copy(speech / f"{line.partition('|')[0]}.flac", tmp_path / "recordings")
    (tmp_path / "recordings.csv").write_text("\n".join([lines[0], *(line[3:] for line in wanted)]) + "\n")
    done = run_pipeline(tmp_path, tiny_model, "--all", "--num-workers", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    results: dict[str, Any] = json.loads((tmp_path / "output" / "evaluation" / "comparison_results.json").read_text())
    assert results
    assert (tmp_path / "output" / "evaluation" / "index.html").is_file()
    from qwen import load_voice_model

    assert load_voice_model(str(tmp_path / "output" / "voice-lin")).get_supported_speakers() == ["lin"]
    again = run_pipeline(tmp_path, tiny_model, "--process", "--prepare", "--num-workers", "0")
    assert again.returncode == 0 and "6 have codes already" in again.stdout
