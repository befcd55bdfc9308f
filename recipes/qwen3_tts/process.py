"""Turns recordings into a voice's training data: speech cut at pauses, with its words, judged; rejects with reasons.

python process.py --input-dir recordings --output-dir voice --speaker-name anna --i-have-consent --asr-model small
The same command again goes on where it was stopped, and takes in what was added.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from assembly import Assembled, assemble, count
from consent import add_consent, require_consent
from on_ray import as_workers_find, ray_connected, ray_errors_named, workers_with_room
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
            try:
                record = self._recorder.process(source)
                if not record.get("retry"):
                    self._results.save(source, record)
            finally:  # when stopped on request, too: only what kills the process leaves its try standing
                self._results.end(source)
        return {"source": row["source"], "record": json.dumps(record), "took_s": time.monotonic() - began}


def work_here(sources: Sequence[Source], args: argparse.Namespace, settings: Settings) -> Iterator[dict[str, Any]]:
    worker = Worker(str(args.output_dir), settings, chosen_device(args.device), args.cpus_per_worker)
    with _stopped_in_order():
        for source in sources:
            yield worker({"source": json.dumps(asdict(source))})


@contextmanager
def _stopped_in_order() -> Iterator[None]:
    """Makes a request to stop an exception, as Ctrl-C is one: else it would look as if the recording had killed us."""

    def stop(number: int, _: object) -> None:
        sys.exit(128 + number)

    requests = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is signal.SIG_DFL]
    for request in requests:  # under nohup SIGHUP is none
        signal.signal(request, stop)
    try:
        yield
    finally:
        for request in requests:
            signal.signal(request, signal.SIG_DFL)


def work_on_ray(sources: Sequence[Source], args: argparse.Namespace, settings: Settings) -> Iterator[dict[str, Any]]:
    """Long recordings first, one at a time to each actor, so that none is left alone with them at the end."""
    import ray.data

    workers = workers_with_room(args.device, args.num_workers, args.cpus_per_worker).at_most(len(sources))
    print(workers, flush=True)
    by_size = sorted(sources, key=lambda source: -source.size)
    dataset = ray.data.from_items(
        [{"source": json.dumps(asdict(source))} for source in by_size],
        override_num_blocks=len(by_size),  # a block is what an actor gets at once
    )
    done = dataset.map(
        Worker,
        compute=ray.data.ActorPoolStrategy(size=workers.num, max_tasks_in_flight_per_actor=2),
        fn_constructor_args=(str(args.output_dir), settings, workers.device, args.cpus_per_worker),
        **workers.needs,
    )
    with ray_errors_named():
        yield from done.iter_rows()


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
        results.forget_tries()
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
    if not args.asr_model and not args.transcripts:
        raise ValueError(
            "what is said must be known: give --transcripts FILE, --asr-model small (or a folder), or both"
        )
    found = find_sources(Asked(args.input_dir, args.output_dir, args.transcripts, args.speaker_name, args.speaker_from))
    consent = require_consent(args, {source.speaker for source in found.sources})
    settings = Settings(args.asr_model and as_workers_find(args.asr_model), language_letters(args.language))
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
    _write_summary(args.output_dir / "process.json", summary)
    write_report(args.output_dir / "report.html", assembled.kept, assembled.rejected, summary)
    return assembled, counts


def _write_summary(path: Path, summary: dict[str, Any]) -> None:
    """Where all else is as it was, nothing is stated anew: the date of consent stays, and with it every byte."""

    def content(date: str) -> bytes:
        dated = summary | {"consent": summary["consent"] | {"date": date}}
        return json.dumps(dated, ensure_ascii=False, indent=2).encode() + b"\n"

    try:
        before = path.read_bytes()
        if content(json.loads(before)["consent"]["date"]) == before:
            return
    except (OSError, ValueError, LookupError, TypeError):  # there is none, or none that we wrote
        pass
    with whole_file(path) as file:
        file.write(content(summary["consent"]["date"]))


def language_letters(language: str) -> str:
    """Of a name or letters: en for English."""
    known = {name.lower(): letters for letters, name in LANGUAGES.items()} | {letters: letters for letters in LANGUAGES}
    lower = language.lower()
    if lower != "auto" and lower not in known:
        speaks = ", ".join(f"{letters} ({name})" for letters, name in LANGUAGES.items())
        raise ValueError(f"--language {language}: Qwen3-TTS speaks {speaks}")
    return known.get(lower, "auto")


def _tell(assembled: Assembled, counts: dict[str, Any], args: argparse.Namespace) -> None:
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
    print(f"written: segments.jsonl, rejected.jsonl, process.json, report.html in {args.output_dir}")
    if not args.asr_model:
        print("the transcripts were not compared with what is said: --asr-model small (or a folder) does that")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--input-dir", type=Path, required=True, help="folder with recordings, sub-folders included")
    add("--output-dir", type=Path, default=Path("voice"), help="gets all results (default: %(default)s)")
    add("--speaker-name", help="whose voice it is; with --speaker-from for recordings that do not say it")
    add("--speaker-from", choices=["name", "folder", "transcripts"], default="name",
        help="where speakers are named: by --speaker-name, by the first folder below the input,"
        " or in the transcript file (default: %(default)s)")  # fmt: skip
    add(
        "--transcripts",
        type=Path,
        help="what is said: CSV (with , | ; or tabs) or JSONL with audio, file or id; text; perhaps speaker",
    )
    add("--asr-model", help="faster-whisper model, a folder or a size as small: hears what has no transcript, and"
        " compares the transcripts that there are with what is said")  # fmt: skip
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
    _tell(assembled, counts, args)
    if not assembled.kept:
        # Whole recordings were named as they came; of segments one says what is wrong with all, or nearly.
        for row in [row for row in assembled.rejected if row["end_s"] is not None][:1]:
            print(f"{Path(row['source']).name}: {row['reason']}, {row['detail']}")
        sys.exit(f"nothing can be used: {args.output_dir / 'rejected.jsonl'} says why, line by line")


if __name__ == "__main__":
    main()
