"""The stages of the voice project as command lines of the recipe's scripts, by the flags of this lesson."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from keepstep.errors import KeepstepError
from keepstep.recipes import recipe_folder

BASE_MODEL = "Qwen/Qwen3-TTS-12Hz-1.7B-Base"
CONSENT_FLAG = "--i-have-consent"

Command = list[str]


class StageFailed(Exception):
    """The text says which, and what to do."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Every stage takes all of them, so that one command line fits the whole; each uses its own."""
    add = parser.add_argument
    add("--input-dir", type=Path, default=Path("recordings"), help="audio or video files (default: %(default)s)")
    add("--output-dir", type=Path, default=Path("output"), help="gets all that is made (default: %(default)s)")
    add("--model-path", default=BASE_MODEL, help="folder or hub id of a base model (default: %(default)s)")
    add("--num-workers", type=int, help="workers of every stage; 0: all in one process, without Ray (default: data: as "
        "many as there is room for; training: 1)")  # fmt: skip
    add("--batch-size", type=int, help="utterances a training step, of all workers together: about, steps are filled "
        "by length (default: 2,000 frames, 160 s)")  # fmt: skip
    add("--learning-rate", type=float, help="(default: that of train.py)")
    add("--num-epochs", type=int, default=10, help="at most (default: %(default)s)")
    add("--speaker-name", help="whose voice it is")
    add(
        "--speaker-from",
        choices=["name", "folder", "transcripts"],
        help="what says whose a recording is, of several speakers (default: name)",
    )
    add("--transcripts", type=Path, help="what is said, as CSV or JSONL")
    add("--asr-model", help="faster-whisper model, a folder or a size as small: hears what is said, and scores")
    add("--language", default="auto", help="as English (default: %(default)s)")
    add("--texts", type=Path, help="what to say in the comparison (default: the texts that training held out)")
    add("--other-speakers", type=Path, help="recordings of others, a folder each, to rank the voice among")
    add("--strategy", help="of keepstep run: ddp, fsdp2, zero2 ...")
    add(
        "--engine",
        choices=["local", "ray"],
        default="local",
        help="what starts the training's workers (default: %(default)s)",
    )
    add("--precision", help="of keepstep run, as bf16")
    add("--lora-rank", type=int, help="train low-rank additions instead of all weights")
    add("--name", help="of the training's run; the same again resumes it (default: the speaker's)")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="(default: %(default)s)")
    add(CONSENT_FLAG, action="store_true", help="states that the speaker agreed to this use of the recordings")
    add("--consent-note", help="on what it rests; is recorded")


def process(args: argparse.Namespace) -> Iterator[Command]:
    """Recordings to segments with their texts."""
    yield script("process.py", "--input-dir", args.input_dir, "--output-dir", args.output_dir, "--language",
                 args.language, *given(args, "speaker_name", "speaker_from", "transcripts", "asr_model", "num_workers"),
                 *shared(args))  # fmt: skip


def prepare(args: argparse.Namespace) -> Iterator[Command]:
    """Segments to the codec's codes."""
    yield script("prepare.py", "--segments", args.output_dir / "segments.jsonl", "--output-dir", args.output_dir,
                 "--model-path", args.model_path, "--device", args.device,
                 *given(args, "num_workers"), *optional("--speaker", args.speaker_name))  # fmt: skip


def train(args: argparse.Namespace) -> Iterator[Command]:
    """Codes to a run, and the run to a voice that can be loaded."""
    codes = args.output_dir / "codes.jsonl"
    engine = ["--engine", "ray"] if args.engine == "ray" else []
    yield [
        sys.executable, "-m", "keepstep", "run", "--workers", str(max(1, args.num_workers or 1)), *engine,
        *given(args, "strategy", "precision"), "--device", args.device,
        "--name", run_name(args), "--storage", str(args.output_dir / "runs"),
        str(recipe() / "train.py"), "--codes", str(codes), "--model-path", args.model_path,
        *optional("--speaker", args.speaker_name), "--language", args.language, "--num-epochs", str(args.num_epochs),
        *optional("--batch-frames", batch_frames(codes, args.batch_size)),
        *given(args, "learning_rate", "lora_rank"), *consent(args),
    ]  # fmt: skip
    yield script("export.py", "--run", args.output_dir / "runs" / run_name(args), "--output", voice_folder(args),
                 "--model-path", args.model_path, "--overwrite")  # fmt: skip


def infer(args: argparse.Namespace) -> Iterator[Command]:
    """Base and trained voice say the same texts, which are then scored, and shown in one page a speaker."""
    speakers = speakers_to_compare(args)
    for speaker in speakers:
        evaluation = args.output_dir / "evaluation" / (speaker if len(speakers) > 1 else "")
        reference, its_text = reference_of(args, speaker)
        yield script("infer.py", "--base-model", args.model_path, "--voice", voice_folder(args), "--speaker", speaker,
                     *given(args, "texts"), "--language", args.language, "--ref-audio", reference,
                     *optional("--ref-text", its_text), "--output-dir", evaluation, *shared(args))  # fmt: skip
        asr = ["--asr-model", args.asr_model] if args.asr_model else ["--skip", "wer"]
        yield script("evaluate.py", "--evaluation-dir", evaluation, "--device", args.device, *asr,
                     *given(args, "other_speakers"))  # fmt: skip


STAGES: dict[str, Callable[[argparse.Namespace], Iterator[Command]]] = {
    "process": process,
    "prepare": prepare,
    "train": train,
    "infer": infer,
}


def run(stages: Sequence[str], args: argparse.Namespace) -> None:
    """Runs the commands of `stages`, each shown before it is started; ends with the first that fails."""
    for number, stage in enumerate(stages):
        try:
            for command in STAGES[stage](args):
                print(f"\n$ {shown(command)}", flush=True)
                if code := subprocess.call(command):
                    raise StageFailed(f"it ended with exit code {code}; what it said is above")
        except (StageFailed, KeepstepError) as error:
            left = " ".join(f"--{name}" for name in stages[number:])
            how = f"go on with the same flags and {left}" if len(stages) > 1 else "give the same command again"
            raise StageFailed(f"{stage} failed: {error}. What is done is kept: mend it and {how}") from None


def main(stage: str, description: str | None) -> None:
    """What src/*.py do: one stage."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser)
    try:
        run([stage], parser.parse_args())
    except StageFailed as error:
        sys.exit(str(error))


# ---- parts of command lines


def recipe() -> Path:
    return recipe_folder("qwen3_tts")


def script(name: str, *words: object) -> Command:
    return [sys.executable, str(recipe() / name), *map(str, words)]


def given(args: argparse.Namespace, *names: str) -> Command:
    """The flags among `names` that the user gave."""
    found = []
    for name in names:
        found += optional(f"--{name.replace('_', '-')}", getattr(args, name))
    return found


def optional(flag: str, value: object | None) -> Command:
    return [] if value is None else [flag, str(value)]


def consent(args: argparse.Namespace) -> Command:
    return [*([CONSENT_FLAG] if args.i_have_consent else []), *given(args, "consent_note")]


def shared(args: argparse.Namespace) -> Command:
    return ["--device", args.device, *consent(args)]


def shown(command: Command) -> str:
    """As one would type it."""
    if command[1:3] == ["-m", "keepstep"]:
        return shlex.join(["keepstep", *command[3:]])
    return shlex.join(["python", *command[1:]])


# ---- what a stage takes from the one before it


def run_name(args: argparse.Namespace) -> str:
    return args.name or (args.speaker_name or "voice").lower()


def voice_folder(args: argparse.Namespace) -> Path:
    return Path(args.output_dir) / f"voice-{run_name(args)}"


def batch_frames(codes: Path, batch_size: int | None) -> int | None:
    """train.py counts frames, not utterances: so no step has more work than another. The longest must fit in one."""
    if batch_size is None:
        return None
    rows = read_jsonl(codes, "run --prepare first")
    lengths = [len(row["audio_codes"]) + 1 for row in rows]  # and the end of speech
    return max(max(lengths), round(batch_size * sum(lengths) / len(lengths)))


def speakers_to_compare(args: argparse.Namespace) -> list[str]:
    if args.speaker_name:
        return [str(args.speaker_name).lower()]
    return sorted({row["speaker"] for row in read_jsonl(args.output_dir / "codes.jsonl", "run --prepare first")})


def reference_of(args: argparse.Namespace, speaker: str) -> tuple[Path, str | None]:
    """The recording that the base model clones from, and what is said in it: with both it clones best."""
    codes = args.output_dir / "codes.jsonl"
    own = [row for row in read_jsonl(codes, "run --prepare first") if row["speaker"] == speaker]
    if not own:
        raise StageFailed(f"{codes} has no rows of {speaker}")
    audio = own[0]["ref_audio"]
    text = next((row["text"] for row in own if row["audio"] == audio), None)
    return Path(args.output_dir) / audio, text


def read_jsonl(path: Path, otherwise: str) -> list[dict[str, Any]]:
    if not path.is_file():
        raise StageFailed(f"{path} is not there: {otherwise}")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
