"""Scores the base model's and the fine-tuned voice's speech beside real recordings, and says what was shown.

python evaluate.py --evaluation-dir voice/evaluation --real held_out.jsonl --other-speakers others.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from audio import AudioError, load_audio
from page import write_page
from qwen import chosen_device
from rows import Row, read_rows
from scores import (
    SCORER_RATE_HZ,
    Embedding,
    Quality,
    SpeakerEncoder,
    Speakers,
    Summary,
    Transcriber,
    Unavailable,
    Unscorable,
    Wav,
    characters_per_second,
    duration_ratio,
    summarise,
)
from spoken import compare
from transcripts import LANGUAGES
from verdict import GENERATED, METRICS, SYSTEMS, table, verdict

from keepstep.data.fetch import whole_file

RESULTS = "comparison_results.json"
FORMAT = 1
COLUMNS = ("similarity", "wer", "dnsmos")
"""Those that need a model."""
AUDIO_SUFFIXES = (".wav", ".flac", ".mp3", ".m4a", ".ogg", ".opus")
# Rows carry the names of Qwen3-TTS's languages, Whisper takes letters.
WHISPER_LANGUAGES = {name.lower(): letters for letters, name in LANGUAGES.items()}

Scorer = TypeVar("Scorer")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--evaluation-dir", type=Path, default=Path("voice/evaluation"), help="what infer.py wrote")
    add(
        "--real",
        "--real-dir",
        type=Path,
        help="recordings of the target that were not trained on: rows (JSONL) or a folder; "
        "without it, those of infer.py's rows",
    )
    add(
        "--other-speakers",
        type=Path,
        help="other people's recordings, to rank the target among: rows with a speaker, or a folder with one each",
    )
    add("--speaker", help="the target's name; without it as infer.py or the rows have it")
    add("--max-per-speaker", type=int, default=20, help="recordings of each speaker that are compared with")
    add("--asr-model", default="small", help="a size of Whisper, or a folder with a faster-whisper model")
    add("--asr-language", help="as en; without it that of infer.py's rows, or detected")
    add("--skip", nargs="*", choices=COLUMNS, default=[], help="leave these scores out")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="(default: %(default)s)")
    add("--seed", type=int, default=0, help="of the intervals' resampling")
    return parser.parse_args(argv)


@dataclass
class Scorers:
    """Those that can be used here, and why the others can't."""

    encoder: SpeakerEncoder | None = None
    transcriber: Transcriber | None = None
    quality: Quality | None = None
    left_out: dict[str, str] = field(default_factory=dict)

    def load(self, column: str, skip: Sequence[str], make: Callable[[], Scorer]) -> Scorer | None:
        if column in skip:
            self.left_out[column] = "left out by --skip"
            return None
        try:
            return make()
        except Unavailable as error:
            self.left_out[column] = str(error)
            return None


def load_scorers(args: argparse.Namespace, language: str | None) -> Scorers:
    device = chosen_device(args.device)
    scorers = Scorers()
    scorers.encoder = scorers.load("similarity", args.skip, lambda: SpeakerEncoder(device))
    scorers.transcriber = scorers.load("wer", args.skip, lambda: Transcriber(args.asr_model, device, language))
    scorers.quality = scorers.load("dnsmos", args.skip, lambda: Quality(torch.get_num_threads()))
    return scorers


# ---- the recordings that are compared with


def read_recordings(path: Path, speaker: str | None = None) -> list[Row]:
    """Rows of a JSONL file, or the audio files of a folder, of which a file's own folder names the speaker."""
    if not path.is_dir():
        return read_rows(path, needed=("audio",))
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in AUDIO_SUFFIXES)
    if not files:
        raise ValueError(f"{path} holds no audio files ({', '.join(AUDIO_SUFFIXES)})")
    return [{"audio": str(file.resolve()), "speaker": (speaker or file.parent.name).lower()} for file in files]


def target_rows(args: argparse.Namespace, rows: list[Row], settings: Mapping[str, Any]) -> tuple[str, list[Row]]:
    """The target's name, and real recordings of theirs: all of --real that are by them, or those of the texts."""
    named = args.speaker or settings.get("speaker")
    if args.real is None:
        real = [
            {"audio": row.get("source", row["real"]), "text": row["text"], "speaker": named}
            for row in rows
            if row.get("real")
        ]
        return str(named or "target").lower(), real
    real = read_recordings(args.real, named)
    speakers = sorted({row["speaker"].lower() for row in real if row.get("speaker")})
    if named is None and len(speakers) > 1:
        raise ValueError(f"{args.real} has several speakers ({', '.join(speakers)}): name the target with --speaker")
    target = str(named or (speakers or ["target"])[0]).lower()
    if speakers and target not in speakers:
        raise ValueError(f"{args.real} has no recordings of {target}; it has {', '.join(speakers)}")
    # What the base model was shown of the voice is no fair measure of what it made of it.
    shown = settings.get("ref_audio")
    kept = [row for row in real if (row.get("speaker") or target).lower() == target and row["audio"] != shown]
    if not kept:
        raise ValueError(f"{args.real} has no recording of {target} apart from the reference {shown}")
    return target, kept


def other_rows(args: argparse.Namespace, target: str) -> dict[str, list[Row]]:
    by_speaker: dict[str, list[Row]] = {}
    if args.other_speakers is not None:
        for row in read_recordings(args.other_speakers):
            if not row.get("speaker"):
                raise ValueError(f"{args.other_speakers} has a row without a speaker: {row['audio']}")
            by_speaker.setdefault(row["speaker"].lower(), []).append(row)
    by_speaker.pop(target, None)
    return by_speaker


def spread(rows: list[Row], most: int) -> list[Row]:
    """At most `most` of them, evenly from the first to the last: neighbours are often of one session."""
    if len(rows) <= most:
        return rows
    return [rows[k * len(rows) // most] for k in range(most)]


def embed_speakers(
    encoder: SpeakerEncoder, target: str, by_speaker: Mapping[str, list[Row]], failed: list[dict[str, str]]
) -> Speakers:
    """Recordings without an embedding are named in `failed`."""
    recordings: dict[str, dict[str, Embedding]] = {}
    for speaker, rows in by_speaker.items():
        own = recordings.setdefault(speaker, {})
        for row in rows:
            try:
                own[row["audio"]] = encoder.embed(load_audio(row["audio"], SCORER_RATE_HZ))
            except (AudioError, Unscorable) as error:
                failed.append({"audio": row["audio"], "speaker": speaker, "reason": str(error)})
    return Speakers(target, recordings)


# ---- the scores of one recording


@dataclass
class Measure:
    """All that a recording is measured with."""

    scorers: Scorers
    speakers: Speakers | None
    pace: float | None
    """The target's characters a second."""

    def recording(self, path: str, text: str, real: Wav | None, source: str | None = None) -> dict[str, Any]:
        """Its scores; what could not be scored is under `missing`, with the reason."""
        found: dict[str, Any] = {"audio": path, "missing": {}}
        try:
            wav = load_audio(path, SCORER_RATE_HZ)
        except AudioError as error:
            found["missing"]["audio"] = str(error)
            return found
        found["duration_s"] = len(wav) / SCORER_RATE_HZ
        for name, score in (("similarity", self._voice), ("wer", self._words), ("dnsmos", self._quality)):
            try:
                found |= score(wav, text, source)
            except Unscorable as error:
                found["missing"][name] = str(error)
        real_s = len(real) / SCORER_RATE_HZ if real is not None else None
        if ratio := duration_ratio(found["duration_s"], text, real_s, self.pace):
            found["duration_ratio"], found["duration_basis"] = ratio
        return found

    def _voice(self, wav: Wav, _text: str, source: str | None) -> dict[str, Any]:
        if self.scorers.encoder is None or self.speakers is None:
            return {}
        place = self.speakers.place(self.scorers.encoder.embed(wav), without=source)
        return asdict(place)

    def _words(self, wav: Wav, text: str, _source: str | None) -> dict[str, Any]:
        if self.scorers.transcriber is None or not text:
            return {}
        transcript = self.scorers.transcriber.transcribe(wav)
        errors = compare(text, transcript)
        return asdict(errors) | {"transcript": transcript, "wer": errors.wer, "cer": errors.cer}

    def _quality(self, wav: Wav, _text: str, _source: str | None) -> dict[str, Any]:
        if self.scorers.quality is None:
            return {}
        score = self.scorers.quality.score(wav)
        return {"dnsmos": score["overall"], "dnsmos_parts": score}


def measure_row(measure: Measure, row: Row) -> dict[str, Any]:
    """One text: its recording by each system that has one."""
    scored: dict[str, Any] = {"id": row["id"], "text": row["text"]}
    real = _audio_or_none(row.get("real"))
    for system in SYSTEMS:
        if not row.get(system):
            continue
        source = row.get("source", row["real"]) if system == "real" else None
        found = measure.recording(row[system], row["text"], real if system != "real" else None, source)
        if system in GENERATED:
            found["cut"] = bool(row.get("cut", {}).get(system))
            seconds = row.get("seconds", {}).get(system)
            if seconds is not None and found.get("duration_s"):
                found["real_time_factor"] = seconds / found["duration_s"]
        else:
            found.pop("duration_ratio", None)  # it is what the others are compared with
        scored[system] = found
    return scored


def _audio_or_none(path: str | None) -> Wav | None:
    try:
        return load_audio(path, SCORER_RATE_HZ) if path else None
    except AudioError:  # named where the recording itself is scored
        return None


# ---- the scores of all


def aggregate(files: list[dict[str, Any]], system: str, seed: int) -> dict[str, Any]:
    """Each metric's summary over a system's recordings, where the target ranks, and how many were cut."""
    scored = [file[system] for file in files if system in file]
    found: dict[str, Any] = {"num_files": len(scored), "cut": sum(bool(one.get("cut")) for one in scored)}
    for metric in METRICS:
        having = [one for one in scored if metric.key in one]
        weights = [one[metric.weight] for one in having] if metric.weight else None
        found[metric.key] = _plain(summarise([one[metric.key] for one in having], weights, seed))
    placed = [one for one in scored if "to_each" in one]
    if placed:
        speakers = placed[0]["to_each"]
        means = {name: sum(one["to_each"][name] for one in placed) / len(placed) for name in speakers}
        target = next(iter(speakers))
        found["rank"] = 1 + sum(mean > means[target] for mean in means.values())
        found["first"] = sum(one["rank"] == 1 for one in placed)
        found["nearest"] = max(means, key=lambda name: means[name])
    return found


def differences(files: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    """Fine-tuned less base, text by text: what the same texts have in common does not blur it."""
    found = {}
    for metric in METRICS:
        pairs = [
            (file["base"], file["fine_tuned"])
            for file in files
            if all(metric.key in file.get(system, {}) for system in GENERATED)
        ]
        if metric.better is not None:
            weights = [base[metric.weight] for base, _ in pairs] if metric.weight else None
            found[metric.key] = _plain(
                summarise([tuned[metric.key] - base[metric.key] for base, tuned in pairs], weights, seed)
            )
    return found


def band(values: list[float], seed: int) -> dict[str, Any] | None:
    """The summary of a band, and between which values nine in ten of its recordings lie."""
    summary = summarise(values, seed=seed)
    if summary is None:
        return None
    ordered = torch.tensor(values, dtype=torch.float64)
    low, high = torch.quantile(ordered, torch.tensor([0.05, 0.95], dtype=torch.float64)).tolist()
    return asdict(summary) | {"from": low, "to": high}


def _plain(summary: Summary | None) -> dict[str, Any] | None:
    return asdict(summary) if summary else None


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
    folder = args.evaluation_dir
    rows = read_rows(folder / "generated.jsonl", needed=("id", "text"))
    settings = json.loads((folder / "infer.json").read_text()) if (folder / "infer.json").is_file() else {}
    target, real = target_rows(args, rows, settings)
    language = args.asr_language or WHISPER_LANGUAGES.get(str(_only([row.get("language") for row in rows])).lower())
    scorers = load_scorers(args, language)
    by_speaker = {target: spread(real, args.max_per_speaker)}
    by_speaker |= {name: spread(own, args.max_per_speaker) for name, own in other_rows(args, target).items()}
    failed: list[dict[str, str]] = []
    speakers = None
    if scorers.encoder is not None:
        try:
            speakers = embed_speakers(scorers.encoder, target, by_speaker, failed)
        except ValueError as error:
            scorers.left_out["similarity"] = f"{error}: give recordings of {target} with --real"
    timed = [row for row in real if row.get("text")]
    pace = characters_per_second([row["text"] for row in timed], [_duration_s(row) for row in timed])
    measure = Measure(scorers, speakers, pace)
    files, on_terminal = [], sys.stderr.isatty()
    for number, row in enumerate(rows, 1):
        if on_terminal:  # in a file the lines would stand one behind the other
            print(f"\rscoring text {number} of {len(rows)}", end="", file=sys.stderr, flush=True)
        files.append(measure_row(measure, row))
    if on_terminal:
        print(file=sys.stderr)
    # Where no text has a real recording of its own, others of the target show what can be reached.
    ceiling = (
        [] if any("real" in file for file in files) else [measure_row(measure, row) for row in _as_real(real, args)]
    )
    results = {
        "format": FORMAT,
        "speaker": target,
        "settings": {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()},
        "generation": settings,
        "left_out": scorers.left_out,
        "compared_with": {name: len(own) for name, own in by_speaker.items()},
        "not_compared_with": failed,
        "characters_per_second": pace,
        "bands": {
            "same_speaker": band(speakers.same_speaker(), args.seed) if speakers else None,
            "different_speakers": band(speakers.different_speakers(), args.seed) if speakers else None,
        },
        "systems": {system: aggregate([*files, *ceiling], system, args.seed) for system in SYSTEMS},
        "differences": differences(files, args.seed),
    }
    results["verdict"] = verdict(results)
    return results | {
        "files": [_relative(file, folder) for file in files],
        "other_real_files": [_relative(file, folder) for file in ceiling],
    }


def _as_real(recordings: list[Row], args: argparse.Namespace) -> list[Row]:
    return [
        {"id": f"real-{number:04}", "text": row.get("text", ""), "real": row["audio"]}
        for number, row in enumerate(spread(recordings, args.max_per_speaker), 1)
    ]


def _only(values: list[Any]) -> Any:
    """The one value that all have, or None."""
    return values[0] if len(set(values)) == 1 else None


def _duration_s(row: Row) -> float:
    if row.get("duration_s"):
        return float(row["duration_s"])
    return len(load_audio(row["audio"], SCORER_RATE_HZ)) / SCORER_RATE_HZ


def _relative(file: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Links of the page: relative, so that the folder can be moved or sent whole."""
    for system in SYSTEMS:
        if system in file:
            path = Path(file[system]["audio"])
            inside = path.is_relative_to(folder.resolve())
            file[system]["audio"] = path.relative_to(folder.resolve()).as_posix() if inside else str(path)
    return file


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    try:
        results = evaluate(args)
        with whole_file(args.evaluation_dir / RESULTS) as file:
            file.write((json.dumps(results, indent=1, ensure_ascii=False) + "\n").encode())
        page = write_page(args.evaluation_dir, results)
    except ValueError as error:
        sys.exit(str(error))
    print(table(results))
    print()
    for line in results["verdict"]:
        print(line)
    print(f"\n{args.evaluation_dir / RESULTS}\n{page}")


if __name__ == "__main__":
    main()
