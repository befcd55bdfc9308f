"""Scores the base model's and the fine-tuned voice's speech beside real recordings, and says what was shown.

python evaluate.py --evaluation-dir voice/evaluation --real held_out.jsonl --other-speakers others.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from evaluation_folder import RESULTS, SETTINGS, SPEECH, SYNTHETIC, SYSTEMS
from measure import Measure, Scorers, measure_row
from page import write_page
from qwen import chosen_device
from real_recordings import Failed, embed_speakers, other_rows, pace_of, spread, target_rows
from rows import Row, read_rows
from scores import Quality, SpeakerEncoder, Summary, Transcriber, summarise
from transcripts import LANGUAGES
from verdict import METRICS, table, verdict

from keepstep.data.fetch import whole_file

FORMAT = 1
COLUMNS = ("similarity", "wer", "dnsmos")
"""Those that need a model."""
# Rows carry the names of Qwen3-TTS's languages, Whisper takes letters.
WHISPER_LANGUAGES = {name.lower(): letters for letters, name in LANGUAGES.items()}


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


def load_scorers(args: argparse.Namespace, language: str | None) -> Scorers:
    device = chosen_device(args.device)
    scorers = Scorers()
    scorers.encoder = scorers.load("similarity", args.skip, lambda: SpeakerEncoder(device))
    scorers.transcriber = scorers.load("wer", args.skip, lambda: Transcriber(args.asr_model, device, language))
    scorers.quality = scorers.load("dnsmos", args.skip, lambda: Quality(torch.get_num_threads()))
    return scorers


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
            if all(metric.key in file.get(system, {}) for system in SYNTHETIC)
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
    rows = read_rows(folder / SPEECH, needed=("id", "text"))
    settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8")) if (folder / SETTINGS).is_file() else {}
    target, real = target_rows(args.real, args.speaker, rows, settings)
    language = args.asr_language or WHISPER_LANGUAGES.get(str(_only([row.get("language") for row in rows])).lower())
    scorers = load_scorers(args, language)
    all_rows = {target: real, **other_rows(args.other_speakers, target)}
    by_speaker = {name: spread(own, args.max_per_speaker) for name, own in all_rows.items()}
    failed: Failed = {}
    speakers = None
    if scorers.encoder is not None:
        try:
            speakers = embed_speakers(scorers.encoder, target, by_speaker, failed)
        except ValueError as error:
            scorers.left_out["similarity"] = f"{error}: give recordings of {target} with --real"
    measure = Measure(scorers, speakers, pace_of(target, real, failed))
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
    compared_with = {name: sum(row["audio"] not in failed for row in own) for name, own in by_speaker.items()}
    results = {
        "format": FORMAT,
        "speaker": target,
        "settings": {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()},
        "generation": settings,
        "left_out": scorers.left_out,
        "compared_with": {name: count for name, count in compared_with.items() if count or name == target},
        "not_compared_with": [{"audio": path} | about for path, about in failed.items()],
        "characters_per_second": measure.pace,
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
    for one in results["not_compared_with"]:
        print(f"not compared with {one['audio']} of {one['speaker']}: {one['reason']}")
    print(f"\n{args.evaluation_dir / RESULTS}\n{page}")


if __name__ == "__main__":
    main()
