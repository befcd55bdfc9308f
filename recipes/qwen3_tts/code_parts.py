"""Codes as they are made, in Parquet parts that stay when a run is killed, found again by what the audio contains."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from rows import Row

from keepstep.data.fetch import whole_file

Codes = npt.NDArray[np.int64]
Made = tuple[str, Row, bytes, float]
"""Key, row, codes as int16 [frames][codebooks], and seconds of audio."""


class CodeParts:
    """A folder of part-*.parquet. A key is a hash of an audio file's content and of the codec."""

    def __init__(self, folder: Path, num_codebooks: int) -> None:
        self._folder, self._num_codebooks = folder, num_codebooks
        self._parts: dict[Path, list[Row]] = {}
        self._place: dict[str, tuple[Path, int]] = {}
        self.damaged: list[str] = []
        for path in sorted(folder.glob("part-*.parquet")):
            self._read(path)

    def __contains__(self, key: str) -> bool:
        return key in self._place

    def add(self, made: Iterable[Made]) -> None:
        """Writes a part; it is there whole or not at all."""
        rows = []
        for key, row, content, duration_s in made:
            codes = np.frombuffer(content, np.int16).reshape(-1, self._num_codebooks)
            full = row | {"duration_s": row["duration_s"] or round(duration_s, 3)}
            rows.append(full | {"audio_codes": codes.tolist(), "key": key})
        if rows:
            digest = xxhash.xxh3_64("".join(row["key"] for row in rows).encode()).hexdigest()
            self._write(self._folder / f"part-{digest}.parquet", rows)

    def completed(self, current: Iterable[tuple[str, Row]]) -> list[Row]:
        """The rows, as they are now, with the codes of their keys."""
        return [self._completed(key, row) for key, row in current]

    def tidy(self, current: Iterable[tuple[str, Row]]) -> None:
        """Brings the parts up to date: with texts that were mended since, and without rows that are gone."""
        now: dict[Path, list[Row]] = {path: [] for path in self._parts}
        for key, row in current:
            now[self._place[key][0]].append(self._completed(key, row) | {"key": key})
        for path, rows in now.items():
            if not rows:
                path.unlink()
            elif rows != self._parts[path]:
                self._write(path, rows)

    def _completed(self, key: str, row: Row) -> Row:
        path, at = self._place[key]
        old = self._parts[path][at]
        return row | {"duration_s": row["duration_s"] or old["duration_s"], "audio_codes": old["audio_codes"]}

    def _read(self, path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            rows = pq.ParquetFile(path).read().to_pylist()
            keys = [row["key"] for row in rows]
        except (pa.ArrowException, OSError, KeyError) as error:
            first = str(error).splitlines()[0]
            self.damaged.append(f"{path} cannot be read ({first}): its rows are encoded again")
            path.unlink()
            return
        self._keep(path, rows, keys)

    def _write(self, path: Path, rows: list[Row]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            pq.write_table(pa.Table.from_pylist(rows, schema=self._schema(pa)), file)
        self._keep(path, rows, [row["key"] for row in rows])

    def _keep(self, path: Path, rows: list[Row], keys: list[str]) -> None:
        self._parts[path] = rows
        for at, key in enumerate(keys):
            self._place.setdefault(key, (path, at))

    def _schema(self, pa: Any) -> Any:
        texts = ("audio", "text", "speaker", "ref_audio", "language", "key")
        codes = pa.list_(pa.list_(pa.int16(), self._num_codebooks))
        return pa.schema(
            [(name, pa.string()) for name in texts] + [("duration_s", pa.float64()), ("audio_codes", codes)]
        )
