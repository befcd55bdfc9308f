"""Turns recordings into a voice's training data: speech cut at pauses, with its words, judged; rejects with reasons.

python process.py --input-dir recordings --output-dir voice --speaker-name anna --i-have-consent --asr-model small
The same command again goes on where it was stopped, and takes in what was added.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from assembly import Assembled, assemble, count
from consent import add_consent, require_consent
from on_ray import ray_connected
from quality import MAX_CER, MIN_SNR_DB, Limits
from qwen import chosen_device
from recording import Record, Recorder, Settings, Source
from report import write_report
from results import Results
from rows import write_rows
from sources import MAX_NAMED, Asked, find_sources, listed
from transcripts import LANGUAGES, check_model

from keepstep.data.fetch import whole_file

SAY_EVERY_S = 10.0

# ---- the work


class Worker:
    """What a process does, on Ray or here: one recording after another, each result on disk before the next."""

    def __init__(self, output_dir: str, settings: Settings, device: str, num_threads: int) -> None:
        import torch

        torch.set_num_threads(num_threads)
        self._results = Results(Path(output_dir), settings)
        self._recorder = Recorder(Path(output_dir), settings, device, num_threads)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        began = time.monotonic()
        source = Source(**json.loads(row["source"]))
        record = self._results.begin(source)
        if record is None:
            record = self._recorder.process(source)
            if not record.get("retry"):
                self._results.save(source, record)
            self._results.end(source)
        return {"source": row["source"], "record": json.dumps(record), "took_s": time.monotonic() - began}


def work_here(sources: Sequence[Source], args: argparse.Namespace, settings: Settings) -> Iterator[dict[str, Any]]:
    device = chosen_device(args.device)
    worker = Worker(str(args.output_dir), settings, device, args.cpus_per_worker)
    for source in sources:
        yield worker({"source": json.dumps(asdict(source))})


def work_on_ray(sources: Sequence[Source], args: argparse.Namespace, settings: Settings) -> Iterator[dict[str, Any]]:
    """Long recordings first, one at a time to each actor, so that none is left alone with them at the end."""
    import ray.data

    has = ray.cluster_resources()
    num_gpus, num_cpus = int(has.get("GPU", 0)), int(has.get("CPU", 1))
    if args.device == "cuda" and not num_gpus:
        raise ValueError("--device cuda: this Ray has no GPU; give --device cpu, or auto")
    on_gpu = num_gpus > 0 and args.device != "cpu"
    room = max(1, min(num_cpus // args.cpus_per_worker, num_gpus if on_gpu else num_cpus))
    if (args.num_workers or 0) > room:
        raise ValueError(f"--num-workers {args.num_workers}: this Ray has room for {room}: give {room} or fewer")
    num_workers = min(args.num_workers or room, len(sources))
    print(f"{num_workers} worker{'s' * (num_workers > 1)} on {'GPUs' if on_gpu else 'CPUs'}", flush=True)
    by_size = sorted(sources, key=lambda source: -source.size)
    dataset = ray.data.from_items(
        [{"source": json.dumps(asdict(source))} for source in by_size],
        override_num_blocks=len(by_size),  # a block is what an actor gets at once
    )
    done = dataset.map(
        Worker,
        compute=ray.data.ActorPoolStrategy(size=num_workers, max_tasks_in_flight_per_actor=2),
        fn_constructor_args=(
            str(args.output_dir),
            settings,
            "cuda" if on_gpu else "cpu",
            args.cpus_per_worker,
        ),
        num_cpus=args.cpus_per_worker,
        num_gpus=1 if on_gpu else 0,
    )
    try:
        yield from done.iter_rows()
    except (ray.exceptions.RayError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0]
        raise ValueError(f"Ray gave up ({first}); what is done is kept: the same command goes on") from error


def work(
    sources: Sequence[Source], results: Results, args: argparse.Namespace, settings: Settings
) -> list[tuple[Source, Record]]:
    """The record of every source, made now or by a run before."""
    records = {source: record for source in sources if (record := results.load(source)) is not None}
    pending = [source for source in sources if source not in records]
    if records:
        print(f"{len(records)} of {len(sources)} recordings are done already", flush=True)
    if pending and args.num_workers == 0:
        _follow(work_here(pending, args, settings), pending, records)
    elif pending:
        with ray_connected(args.address):
            _follow(work_on_ray(pending, args, settings), pending, records)
    return [(source, records[source]) for source in sources]


def _follow(done: Iterator[dict[str, Any]], pending: Sequence[Source], records: dict[Source, Record]) -> None:
    """Says what was refused at once, and how far it is now and then: there may be thousands."""
    began = said = time.monotonic()
    heard_s = 0.0
    for number, row in enumerate(done, 1):
        source, record = Source(**json.loads(row["source"])), json.loads(row["record"])
        records[source] = record
        heard_s += record["duration_s"]
        for refused in record["rejected"]:
            print(f"{source.relative}: {refused['reason']}, {refused['detail']}", flush=True)
        if "traceback" in record:
            print(record["traceback"], file=sys.stderr, flush=True)
        if time.monotonic() - said > SAY_EVERY_S or number == len(pending):
            said = time.monotonic()
            pace = heard_s / (said - began)
            print(f"{number} of {len(pending)} recordings: {heard_s / 60:.1f} min, {pace:.1f} x real time", flush=True)


# ---- the whole


def process(args: argparse.Namespace) -> tuple[Assembled, dict[str, Any]]:
    """Writes segments.jsonl, rejected.jsonl, process.json and report.html; returns what is in them, and figures."""
    args.output_dir = args.output_dir.resolve()
    if args.check_transcripts and not args.asr_model:
        raise ValueError("--check-transcripts needs --asr-model to hear what is said")
    if not args.asr_model and not args.transcripts:
        raise ValueError(
            "what is said must be known: give --transcripts FILE, --asr-model small (or a folder), or both"
        )
    found = find_sources(Asked(args.input_dir, args.output_dir, args.transcripts, args.speaker_name, args.speaker_from))
    consent = require_consent(args, {source.speaker for source in found.sources})
    settings = Settings(_as_workers_find(args.asr_model), language_letters(args.language), args.check_transcripts)
    if settings.asr_model:
        check_model(settings.asr_model)
    results = Results(args.output_dir, settings)
    results.claim(args.input_dir)
    ignored = f", and files that are none: {listed(found.others)}" if found.others else ""
    print(f"{args.input_dir}: {len(found.sources)} recordings{ignored}", flush=True)
    limits = Limits(args.min_snr_db, max_cer=args.max_cer, allow_narrow_band=args.allow_narrow_band)
    assembled = assemble(work(found.sources, results, args, settings), results, limits, not args.any_speaker)
    assembled.rejected.extend(found.lost)
    if found.lost:
        some = "; ".join(row["detail"] for row in found.lost[:MAX_NAMED])
        assembled.warnings.append(f"rows of {args.transcripts} that were not used: {len(found.lost)} ({some})")
    if num_removed := results.prune(found.sources, assembled.audio):
        print(f"removed {num_removed} files of recordings or settings that are no more")
    counts = count(assembled, len(found.sources))
    described = asdict(settings) | {"limits": asdict(limits), "any_speaker": args.any_speaker}
    write_rows(args.output_dir / "segments.jsonl", assembled.kept)
    write_rows(args.output_dir / "rejected.jsonl", assembled.rejected)
    summary = {"input_dir": str(args.input_dir.resolve()), "settings": described, "counts": counts}
    summary |= {"warnings": assembled.warnings, "consent": consent}
    with whole_file(args.output_dir / "process.json") as file:
        file.write(json.dumps(summary, ensure_ascii=False, indent=2).encode() + b"\n")
    write_report(args.output_dir / "report.html", assembled.kept, assembled.rejected, summary)
    return assembled, counts


def language_letters(language: str) -> str:
    """Of a name or letters: en for English."""
    known = {name.lower(): letters for letters, name in LANGUAGES.items()} | {letters: letters for letters in LANGUAGES}
    lower = language.lower()
    if lower != "auto" and lower not in known:
        speaks = ", ".join(f"{letters} ({name})" for letters, name in LANGUAGES.items())
        raise ValueError(f"--language {language}: Qwen3-TTS speaks {speaks}")
    return known.get(lower, "auto")


def _as_workers_find(model: str | None) -> str | None:
    """Workers have another current folder."""
    folder = Path(model or "").expanduser()
    return str(folder.absolute()) if model and folder.is_dir() else model


def _tell(assembled: Assembled, counts: dict[str, Any], output_dir: Path) -> None:
    for text in assembled.warnings:
        print(f"warning: {text}")
    reasons = ", ".join(f"{number} {reason}" for reason, number in counts["reasons"].items())
    print(f"rejected: {counts['rejected']}{f' ({reasons})' if reasons else ''}")
    print(
        f"kept: {counts['segments']} segments, {counts['minutes']:.1f} min, of {counts['sources_used']} of"
        f" {counts['sources']} recordings"
    )
    for speaker, own in counts["speakers"].items():
        reference = Path(own["ref_audio"]).name
        plural = "s" * (own["segments"] != 1)
        print(f"{speaker}: {own['segments']} segment{plural}, {own['minutes']:.1f} min, reference {reference}")
    print(f"written: segments.jsonl, rejected.jsonl, process.json, report.html in {output_dir}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--input-dir", type=Path, required=True, help="folder with recordings, sub-folders included")
    add("--output-dir", type=Path, default=Path("voice"), help="gets all results (default: %(default)s)")
    add("--speaker-name", help="whose voice it is; with --speaker-from for recordings that do not say it")
    add("--speaker-from", choices=["name", "folder", "transcripts"], default="name",
        help="where speakers are named: by --speaker-name, by the first folder below the input,"
        " or in the transcript file (default: %(default)s)")  # fmt: skip
    add("--transcripts", type=Path,
        help="what is said: CSV (with , or |) or JSONL with audio, file or id; text; perhaps speaker")  # fmt: skip
    add("--asr-model", help="faster-whisper model for what has no transcript: a folder, or a size as small")
    add(
        "--check-transcripts",
        action="store_true",
        help="let the ASR model hear each segment alone, and compare its text with that",
    )
    add("--max-cer", type=float, default=MAX_CER,
        help="letters that may differ there, as a share (default: %(default)s)")  # fmt: skip
    add("--language", default="auto", help="spoken language, as en or English (default: %(default)s)")
    add("--min-snr-db", type=float, default=MIN_SNR_DB,
        help="least level of speech above the background (default: %(default)s)")  # fmt: skip
    add("--allow-narrow-band", action="store_true", help="use telephone and 8 kHz recordings, too")
    add("--any-speaker", action="store_true", help="keep segments that do not sound like the rest of their speaker's")
    add("--num-workers", type=int, help="Ray actors, each with the models (default: as many as there is room for);"
        " 0: in this process, without Ray")  # fmt: skip
    add("--cpus-per-worker", type=int, default=1, help="threads of a worker (default: %(default)s)")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto",
        help="where the models run (default: %(default)s)")  # fmt: skip
    add("--address", help="a Ray cluster that shares these folders, as HOST:6379 or auto"
        " (default: $RAY_ADDRESS, or one is started)")  # fmt: skip
    add_consent(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    try:
        if (args.num_workers or 0) < 0 or args.cpus_per_worker < 1:
            raise ValueError("--num-workers must be 0 or more, and --cpus-per-worker 1 or more")
        assembled, counts = process(args)
    except ValueError as error:
        sys.exit(str(error))
    _tell(assembled, counts, args.output_dir)
    if not assembled.kept:
        sys.exit(f"nothing can be used: {args.output_dir / 'rejected.jsonl'} says why, line by line")


if __name__ == "__main__":
    main()
