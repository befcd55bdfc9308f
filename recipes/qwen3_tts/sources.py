"""Finds recordings below a folder, and says of each whose it is, what is said in it, and what to call its segments."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from recording import Source
from rows import Row
from transcripts import Given, match, read_transcripts

SUFFIXES = (
    *(".wav", ".flac", ".mp3", ".m4a", ".ogg", ".opus", ".aac", ".aiff", ".wma"),
    *(".mp4", ".mkv", ".webm", ".mov", ".avi"),
)
"""Files that are looked at. PyAV reads them with FFmpeg's libraries, which it brings along."""
MAX_NAMED = 5


@dataclass(frozen=True)
class Asked:
    """Which recordings, and how to know whose they are."""

    input_dir: Path
    output_dir: Path
    transcripts: Path | None
    speaker_name: str | None
    speaker_from: str
    """name, folder or transcripts."""


@dataclass(frozen=True)
class Found:
    sources: list[Source]
    lost: list[Row]
    """Rows of the transcript file that fit no recording, as rejected.jsonl has them."""
    others: Counter[str]
    """Suffixes of files that are no recordings."""


def find_sources(asked: Asked) -> Found:
    files, others = find_files(asked.input_dir, asked.output_dir)
    relative = {path: PurePath(path.relative_to(asked.input_dir)) for path in files}
    names = segment_names(list(relative.values()))
    given: dict[PurePath, Given] = {}
    lost: list[tuple[Given, str]] = []
    if asked.transcripts:
        given, lost = match(read_transcripts(asked.transcripts), list(relative.values()))
        if not given:
            raise ValueError(f"no row of {asked.transcripts} fits a recording in {asked.input_dir}: {lost[0][1]}")
        _refuse_mixed(asked, given)
    sources = []
    for path in files:
        inside = relative[path]
        row = given.get(inside)
        sources.append(
            Source(
                path=str(path.resolve()),
                relative=inside.as_posix(),
                name=names[inside],
                speaker=speaker_of(inside, row, asked),
                text=row.text if row else None,
                size=path.stat().st_size,
                modified_ns=path.stat().st_mtime_ns,
            )
        )
    return Found(sources, [_lost_row(asked, row, why) for row, why in lost], others)


def find_files(input_dir: Path, output_dir: Path) -> tuple[list[Path], Counter[str]]:
    """Recordings below the folder, sorted, and the suffixes of what is none; input and output may lie in each other."""
    if not input_dir.is_dir():
        raise ValueError(f"{input_dir} is not a folder: --input-dir takes a folder with recordings")
    files, others = [], Counter[str]()
    own, given = output_dir.resolve(), input_dir.resolve()
    if own == given:
        raise ValueError(f"{input_dir} is --input-dir and --output-dir: recordings and segments would be mixed up")
    surrounds = own in given.parents
    for path in sorted(input_dir.rglob("*")):
        inside = path.relative_to(input_dir)
        is_ours = not surrounds and own in path.resolve().parents
        if not path.is_file() or any(part.startswith(".") for part in inside.parts) or is_ours:
            continue
        if path.suffix.lower() in SUFFIXES:
            files.append(path)
        else:
            others[path.suffix.lower() or path.name] += 1
    if not files:
        found = f"only {listed(others)}" if others else "nothing"
        raise ValueError(f"{input_dir} holds no recordings ({', '.join(SUFFIXES)}), {found}")
    return files, others


def segment_names(files: Sequence[PurePath]) -> dict[PurePath, str]:
    """A name for each file's segments: its stem, or all of its path where two stems are the same."""
    stems = Counter(_plain(path.stem) for path in files)
    names = {path: _plain(path.stem) if stems[_plain(path.stem)] == 1 else _plain(path.as_posix()) for path in files}
    taken = Counter(names.values())
    for path in files:
        if taken[names[path]] > 1:  # "a b.wav" beside "a_b.wav": rare, and told apart by number
            same = sorted(other for other in files if names[other] == names[path])
            names = names | {other: f"{names[path]}_{k}" for k, other in enumerate(same, 1)}
            taken = Counter(names.values())
    return names


def _plain(name: str) -> str:
    """Letters of any script stay; what shells, URLs and file systems stumble over does not."""
    return re.sub(r"[^\w.-]+", "_", name).strip("._") or "recording"


def speaker_of(path: PurePath, row: Given | None, asked: Asked) -> str:
    name = asked.speaker_name
    if asked.speaker_from == "folder" and len(path.parts) > 1:
        name = path.parts[0]
    elif asked.speaker_from == "transcripts" and row and row.speaker:
        name = row.speaker
    if not name:
        missing = {
            "name": "--speaker-name is missing: whose voice is it?",
            "folder": f"{path} lies in no speaker's folder: put it into one, or give --speaker-name for such files",
            "transcripts": f"no transcript names the speaker of {path}: add it, or give --speaker-name for such files",
        }
        raise ValueError(missing[asked.speaker_from])
    lower = name.strip().lower()  # as Qwen3-TTS looks speakers up
    if not re.fullmatch(r"\w[\w.-]*", lower):  # it names a folder, too
        raise ValueError(f"a speaker can't be called {name!r}: letters, digits, _ and - make a name")
    return lower


def _refuse_mixed(asked: Asked, given: dict[PurePath, Given]) -> None:
    named = sorted({row.speaker.lower() for row in given.values() if row.speaker})
    if asked.speaker_from == "name" and len(named) > 1:
        raise ValueError(
            f"{asked.transcripts} names {len(named)} speakers of these recordings ({', '.join(named[:MAX_NAMED])}), and"
            f" all would become {asked.speaker_name}: say --speaker-from transcripts, or take the others out"
        )


def _lost_row(asked: Asked, row: Given, why: str) -> Row:
    return {
        "source": str(asked.transcripts and asked.transcripts.resolve()),
        "start_s": None,
        "end_s": None,
        "speaker": row.speaker and row.speaker.lower(),
        "reason": "no-recording",
        "detail": f"line {row.line}: {why}",
        "text": row.text,
    }


def listed(suffixes: Counter[str]) -> str:
    return ", ".join(f"{number} {suffix}" for suffix, number in suffixes.most_common(MAX_NAMED))
