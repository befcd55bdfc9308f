"""Turns cut speech into the codec's codes, batch by batch, with Ray Data or alone; the same command again goes on.

python prepare.py --segments voice/segments.jsonl --output-dir voice --model-path Qwen/Qwen3-TTS-12Hz-1.7B-Base
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from audio import Wav, audio_info, load_audio
from code_parts import CodeParts, Codes
from on_ray import as_workers_find, ray_connected, ray_errors_named, workers_with_room
from qwen import Codec, chosen_device, load_codec
from rows import Row, read_rows, write_rows

TEXTS = ("audio", "text", "speaker", "ref_audio", "language")
"""Fields of a row that are strings."""
MOST_APART_S = 0.2
"""How far a row's duration may be from its audio's: two frames and rounding."""
LONGEST_S = 120.0
"""Of a row: process.py cuts to 15 s, and a forgotten hour would take all memory."""
BATCH_SECONDS = {"cuda": 120.0, "cpu": 30.0}
"""A second of audio takes some 30 MB while it is encoded; on a CPU larger batches are no faster."""
SAY_EVERY_S = 10.0


@dataclass(frozen=True)
class Task:
    """A row to encode; `number` counts rows from 1."""

    number: int
    audio: str
    key: str
    duration_s: float
    """As the row says, or else the file's header."""
    sample_rate_hz: int
    """Of the file."""


class Encoded(NamedTuple):
    number: int
    codes: bytes
    """int16 [frames][codebooks]; nothing where `reason` says why not."""
    duration_s: float
    reason: str


class Encoder:
    """What one worker does: the codec is loaded once, then batches come."""

    def __init__(self, model_path: str, device: str) -> None:
        if device == "cpu":
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        self._codec = load_codec(model_path, device)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        (text,) = batch["tasks"]
        done = encode_batch(self._codec, [Task(**task) for task in json.loads(str(text))])
        return {field: [getattr(each, field) for each in done] for field in Encoded._fields}


def encode_batch(codec: Codec, tasks: Sequence[Task]) -> list[Encoded]:
    """Every task comes back, with codes or with a reason."""
    failed: list[Encoded] = []
    loaded: list[tuple[Task, Wav]] = []
    for task in tasks:
        try:
            loaded.append((task, load_checked(codec, task)))
        except ValueError as error:
            failed.append(Encoded(task.number, b"", 0.0, str(error)))
    return failed + [
        Encoded(task.number, b"", 0.0, codes)
        if isinstance(codes, str)
        else Encoded(task.number, codes.astype(np.int16).tobytes(), len(wav) / codec.sample_rate_hz, "")
        for (task, wav), codes in zip(loaded, _codes_or_reasons(codec, [wav for _, wav in loaded]), strict=True)
    ]


def load_checked(codec: Codec, task: Task) -> Wav:
    """The audio at the codec's rate; ValueError where it is not what the row says, or nothing to learn from."""
    wav = load_audio(task.audio, codec.sample_rate_hz)
    check_duration(task.audio, len(wav) / codec.sample_rate_hz, task.duration_s)
    if not np.any(wav):
        raise ValueError(f"{task.audio} is digital silence: nothing can be learnt from it")
    return wav


def check_duration(audio: str, found_s: float, said_s: float) -> None:
    if found_s > LONGEST_S:
        raise ValueError(f"{audio} is {found_s:.1f} s long, more than {LONGEST_S:g} s: cut it with process.py")
    if not abs(found_s - said_s) <= MOST_APART_S:  # nor is NaN
        raise ValueError(
            f"{audio} has {found_s:.2f} s, the row says {said_s:.2f} s: it was changed or cut short after it was "
            "written; run process.py again"
        )


def _codes_or_reasons(codec: Codec, wavs: list[Wav]) -> list[Codes | str]:
    if not wavs:
        return []
    try:
        return [_checked(codec, wav, codes) for wav, codes in zip(wavs, codec.encode(wavs), strict=True)]
    except RuntimeError as error:  # torch's, out of memory among them: whose it is shows when each is tried alone
        if len(wavs) > 1:
            return [found for wav in wavs for found in _codes_or_reasons(codec, [wav])]
        first = str(error).strip().splitlines()[0]
        return [f"the codec failed on it ({first}); out of memory? give a smaller --batch-seconds"]


def _checked(codec: Codec, wav: Wav, codes: Codes) -> Codes | str:
    """The codes, or what is wrong with them."""
    expected = (math.ceil(len(wav) / codec.samples_per_frame), codec.num_codebooks)
    if codes.shape != expected:
        return f"the codec gave {codes.shape[0]} frames of {codes.shape[1]} codes, {expected} were expected"
    if codes.min() < 0 or codes.max() >= codec.codebook_size:
        return (
            f"the codec gave codes from {codes.min()} to {codes.max()}, outside its codebook of {codec.codebook_size}"
        )
    return codes


def plan_batches(tasks: Sequence[Task], batch_seconds: float) -> list[list[Task]]:
    """Batches whose audio, each padded to its longest, is at most `batch_seconds` long; the longest come first."""
    batches: list[list[Task]] = []
    for task in sorted(tasks, key=lambda task: (-task.duration_s, task.number)):
        if not batches or (len(batches[-1]) + 1) * batches[-1][0].duration_s > batch_seconds:
            batches.append([])
        batches[-1].append(task)
    return batches


def complete_rows(rows: list[Row], speaker: str | None) -> list[Row]:
    """Rows with all fields, where the seeds' {audio, text, ref_audio} leave some to be told."""
    references: dict[str, str] = {}
    completed = []
    for row in rows:
        full = {name: "" if row.get(name) is None else row[name] for name in TEXTS}
        full["duration_s"] = row.get("duration_s")
        completed.append(full)
        if type(full["speaker"]) is int:  # many corpora number their speakers
            full["speaker"] = str(full["speaker"])
        if _no_strings(full):  # make_task says so
            continue
        full["text"] = full["text"].strip()
        full["speaker"] = (full["speaker"] or speaker or "").lower()
        reference = references.setdefault(full["speaker"], full["ref_audio"] or full["audio"])
        full["ref_audio"] = full["ref_audio"] or reference
        full["language"] = full["language"] or "auto"
    return completed


def _no_strings(row: Row) -> list[str]:
    return [f"its {name} is {row[name]!r}, a string is expected" for name in TEXTS if not isinstance(row[name], str)]


def make_task(number: int, row: Row, codec_identity: str) -> Task | str:
    """The row as a task, or the reason why it can be none."""
    if wrong := _no_strings(row):
        return "; ".join(wrong)
    if not row["text"]:
        return "it has no text"
    if not row["speaker"]:
        return "it names no speaker; give --speaker NAME if all are of one"
    try:
        info = audio_info(row["audio"])
        content = Path(row["audio"]).read_bytes()
        # A header without a duration belongs to streams; reading it whole is the only way to know.
        found_s = info.duration_s or len(load_audio(row["audio"], 8_000)) / 8_000
        duration_s = _number(row["duration_s"], found_s)
        check_duration(row["audio"], found_s, duration_s)
    except (ValueError, OSError) as error:
        return str(error)
    if not Path(row["ref_audio"]).is_file():
        return f"its ref_audio {row['ref_audio']} is not there"
    key = xxhash.xxh3_128(codec_identity.encode() + content).hexdigest()
    return Task(number, row["audio"], key, duration_s, info.sample_rate_hz)


def _number(said: object, otherwise: float) -> float:
    if not isinstance(said, int | float | None) or isinstance(said, bool):
        raise ValueError(f"its duration_s is {said!r}, no number of seconds")
    return float(said) if said is not None else otherwise


def encode_on_ray(tasks: Sequence[Task], args: argparse.Namespace) -> Iterator[list[Encoded]]:
    """What each batch came to, as they are finished."""
    import ray.data

    workers = workers_with_room(args.device, args.num_workers, spare_cpus=1)
    batches = plan_batches(tasks, args.batch_seconds or BATCH_SECONDS[workers.device])
    workers = workers.at_most(len(batches))
    print(f"{workers}, {len(batches)} batches", flush=True)
    dataset = ray.data.from_items(
        [{"tasks": json.dumps([asdict(task) for task in batch])} for batch in batches],
        override_num_blocks=len(batches),  # a block is what an actor gets at once
    )
    pool = ray.data.ActorPoolStrategy(size=workers.num, max_tasks_in_flight_per_actor=2)
    arguments = (as_workers_find(args.model_path), workers.device)
    done = dataset.map_batches(Encoder, batch_size=1, compute=pool, fn_constructor_args=arguments, **workers.needs)
    with ray_errors_named():
        for block in done.iter_batches(batch_size=None, batch_format="numpy"):
            columns = [block[field].tolist() for field in Encoded._fields]
            yield [Encoded(*values) for values in zip(*columns, strict=True)]


def encode_here(codec: Codec, tasks: Sequence[Task], args: argparse.Namespace) -> Iterator[list[Encoded]]:
    for batch in plan_batches(tasks, args.batch_seconds or BATCH_SECONDS[chosen_device(args.device)]):
        yield encode_batch(codec, batch)


def encode_pending(
    tasks: list[Task], rows: list[Row], codec: Codec, parts: CodeParts, args: argparse.Namespace
) -> dict[int, str]:
    """Encodes what has no codes yet, a part a batch; returns the reasons of rows that failed, by number."""
    fresh = {task.key: task for task in tasks if task.key not in parts}  # the same audio twice is encoded once
    if not fresh:
        return {}
    reasons: dict[int, str] = {}
    began = said = time.monotonic()
    num_done, encoded_s = 0, 0.0
    pending = list(fresh.values())
    stage = encode_here(codec, pending, args) if args.num_workers == 0 else encode_on_ray(pending, args)
    keys = {task.number: task.key for task in fresh.values()}
    for done in stage:
        good = [each for each in done if not each.reason]
        reasons.update({each.number: each.reason for each in done if each.reason})
        parts.add([(keys[each.number], rows[each.number - 1], each.codes, each.duration_s) for each in good])
        num_done, encoded_s = num_done + len(done), encoded_s + sum(each.duration_s for each in good)
        if time.monotonic() - said > SAY_EVERY_S or num_done == len(fresh):
            said = time.monotonic()
            rate = encoded_s / max(said - began, 1e-9)
            print(
                f"{num_done} of {len(fresh)} rows: {_minutes(encoded_s)} of audio, {rate:.1f} x real time", flush=True
            )
    failed_keys = {keys[number]: reason for number, reason in reasons.items()}
    return {task.number: failed_keys[task.key] for task in tasks if task.key in failed_keys}


def prepare(args: argparse.Namespace) -> tuple[int, dict[int, str]]:
    """Writes codes.jsonl, and failed.jsonl where rows failed; returns how many rows have codes, and the reasons."""
    rows = complete_rows(read_rows(args.segments, needed=("audio",)), args.speaker)
    codec = load_codec(args.model_path, chosen_device(args.device) if args.num_workers == 0 else "cpu")
    with ThreadPoolExecutor() as pool:  # reading and hashing wait for the disk
        made = list(pool.map(lambda at: make_task(at[0], at[1], codec.identity), enumerate(rows, 1)))
    tasks = [task for task in made if isinstance(task, Task)]
    reasons = {number: reason for number, reason in enumerate(made, 1) if isinstance(reason, str)}
    parts = CodeParts(args.output_dir / "codes", codec.num_codebooks)
    for problem in parts.damaged:
        print(problem)
    print(_what_there_is(args.segments, rows, tasks, parts), flush=True)
    if other := Counter(task.sample_rate_hz for task in tasks if task.sample_rate_hz != codec.sample_rate_hz):
        listed = ", ".join(f"{count} of {rate_hz:,} Hz" for rate_hz, count in sorted(other.items()))
        print(f"resampled to {codec.sample_rate_hz:,} Hz: {listed}")
    if args.num_workers == 0 or all(task.key in parts for task in tasks):
        reasons |= encode_pending(tasks, rows, codec, parts, args)
    else:
        with ray_connected(args.address):
            reasons |= encode_pending(tasks, rows, codec, parts, args)
    good = [(task.key, rows[task.number - 1]) for task in tasks if task.key in parts]
    if good:
        write_rows(args.output_dir / "codes.jsonl", parts.completed(good))
    if not reasons:  # else codes of rows that only failed this time would be lost
        parts.tidy(good)
    _write_failed(args.output_dir / "failed.jsonl", rows, reasons)
    return len(good), reasons


def _what_there_is(segments: Path, rows: list[Row], tasks: list[Task], parts: CodeParts) -> str:
    total_s = sum(task.duration_s for task in tasks)
    num_done = sum(task.key in parts for task in tasks)
    already = f"; {num_done} have codes already" if num_done else ""
    return f"{segments}: {len(rows)} rows, {_minutes(total_s)} of audio{already}"


def _write_failed(path: Path, rows: list[Row], reasons: dict[int, str]) -> None:
    if not reasons:
        path.unlink(missing_ok=True)
        return
    named = (
        {"row": number, "audio": rows[number - 1]["audio"], "reason": reasons[number]} for number in sorted(reasons)
    )
    write_rows(path, named)


def _minutes(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else f"{seconds / 60:.1f} min"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--segments", type=Path, default=Path("voice/segments.jsonl"), help="of process.py (default: %(default)s)")
    add(
        "--output-dir",
        type=Path,
        default=Path("voice"),
        help="gets codes.jsonl, codes/, failed.jsonl (default: %(default)s)",
    )
    add("--model-path", required=True, help="folder or hub id of a Qwen3-TTS model, or of its codec alone")
    add(
        "--batch-seconds", type=float, help="of audio in a batch, padding included (default: 120 on a GPU, 30 on a CPU)"
    )
    add("--num-workers", type=int, help="Ray actors, each with a codec (default: one a GPU, else the CPUs less one); "
        "0: in this process, without Ray")  # fmt: skip
    add("--address", help="a Ray cluster, as HOST:6379 or auto (default: $RAY_ADDRESS, or one is started)")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where the codec runs (default: %(default)s)")
    add("--speaker", help="name of the speaker of rows that name none")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    try:
        if (args.batch_seconds is not None and args.batch_seconds <= 0) or (args.num_workers or 0) < 0:
            raise ValueError("--batch-seconds must be over 0, and --num-workers 0 or more")
        num_good, reasons = prepare(args)
    except ValueError as error:
        sys.exit(str(error))
    if num_good:
        print(f"written: {args.output_dir / 'codes.jsonl'}, {num_good} rows")
    for number in sorted(reasons)[:3]:
        print(f"row {number}: {reasons[number]}")
    if reasons:
        share = "every row" if not num_good else f"{len(reasons)} of {num_good + len(reasons)} rows"
        print(f"{share} failed: {args.output_dir / 'failed.jsonl'} says why, each by its number")
    if not num_good:
        sys.exit(1)


if __name__ == "__main__":
    main()
