"""What became of each recording, kept file by file, so that a run which was killed goes on where it was."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from recording import VERSION, Record, Settings, Source, digest

from keepstep.data.fetch import whole_file

FOLDER = ".done"
MAX_TRIES = 2
"""A recording that has killed so many processes is left alone: it would kill all workers, and every run without Ray."""


class Results:
    """One JSON file a recording in the output folder; audio that is missing or was changed makes it worthless."""

    def __init__(self, output_dir: Path, settings: Settings) -> None:
        self.output_dir = output_dir
        self.folder = output_dir / FOLDER
        self._settings = json.dumps([VERSION, asdict(settings), _model_identity(settings.asr_model)])

    def claim(self, input_dir: Path) -> None:
        """Makes the output folder this input's. What two inputs write there would be mixed up by their names."""
        claimed = self.folder / "input.txt"
        if claimed.is_file() and claimed.read_text(encoding="utf-8") != str(input_dir.resolve()):
            raise ValueError(
                f"{self.output_dir} holds the segments of {claimed.read_text(encoding='utf-8')}: give another"
                " --output-dir, or delete it"
            )
        if not claimed.is_file() and any((self.output_dir / name).is_dir() for name in ("segments", "rejected")):
            raise ValueError(
                f"{self.output_dir} has a folder segments or rejected that process.py did not write: give another"
                " --output-dir"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        with whole_file(claimed) as file:
            file.write(str(input_dir.resolve()).encode())

    def forget_tries(self) -> None:
        """Before a run on Ray: what kills costs workers there, not the run, and a stop leaves tries of all at work."""
        for tries in self.folder.glob("*.tries"):
            tries.unlink()

    def key(self, source: Source) -> str:
        """Changes with the recording, its transcript and all that decides how it is cut."""
        described = asdict(source) | {"path": None}
        return hashlib.sha256((self._settings + json.dumps(described, sort_keys=True)).encode()).hexdigest()[:24]

    def load(self, source: Source) -> Record | None:
        path = self.folder / f"{self.key(source)}.json"
        if not path.is_file():
            return None
        record: Record = json.loads(path.read_text(encoding="utf-8"))
        has_audio = (row["digest"] is None or self.find(source, row) for row in record["segments"])
        return record if all(has_audio) else None

    def save(self, source: Source, record: Record) -> None:
        with whole_file(self.folder / f"{self.key(source)}.json") as file:
            file.write(json.dumps(record, ensure_ascii=False).encode())

    def places(self, source: Source, row: Record) -> tuple[Path, Path]:
        """Where a segment's audio is if it is used, and if it is rejected."""
        used, rejected = (
            self.output_dir / name / source.speaker / f"{row['name']}.wav" for name in ("segments", "rejected")
        )
        return used, rejected

    def find(self, source: Source, row: Record) -> Path | None:
        """Where its audio is now: a run with other settings may have left its own of this name in the other place."""
        return next((path for path in self.places(source, row) if _digest(path) == row["digest"]), None)

    def begin(self, source: Source) -> Record | None:
        """Counts a try, which stays until `end` if the process is killed; a record if there were too many already."""
        path = self._tries(source)
        num_tries = int(path.read_text()) if path.is_file() else 0
        if num_tries >= MAX_TRIES:
            detail = (
                f"{num_tries} processes died of it: it broke the decoder, or memory ran out (on Ray its logs tell);"
                f" delete {path.relative_to(self.output_dir)} to have it tried again"
            )
            rejected = {"start_s": None, "end_s": None, "reason": "crashed", "detail": detail}
            return {"segments": [], "rejected": [rejected], "warnings": [], "duration_s": 0.0, "retry": True}
        with whole_file(path) as file:
            file.write(str(num_tries + 1).encode())
        return None

    def end(self, source: Source) -> None:
        self._tries(source).unlink(missing_ok=True)

    def prune(self, sources: list[Source], audio: set[Path]) -> int:
        """Deletes records of recordings and settings that are no more, and audio that none names; how many files."""
        current = {f"{self.key(source)}.json" for source in sources}
        stale = [path for path in self.folder.glob("*.json") if path.name not in current]
        stale += [path for path in self.folder.glob("*.tries") if f"{path.stem}.json" not in current]
        for name in ("segments", "rejected"):
            stale += [path for path in (self.output_dir / name).rglob("*.wav") if path not in audio]
        for path in stale:
            path.unlink()
        return len(stale)

    def _tries(self, source: Source) -> Path:
        return self.folder / f"{self.key(source)}.tries"


def _digest(path: Path) -> str | None:
    return digest(path) if path.is_file() else None


def _model_identity(model: str | None) -> list[int] | None:
    """Of a folder: another model of the same name is another model."""
    path = Path(model or "").expanduser() / "model.bin"
    return [path.stat().st_size, path.stat().st_mtime_ns] if model and path.is_file() else None
