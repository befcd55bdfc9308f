"""What a prediction was begun with, kept in its output: another one under the same --output is refused."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from keepstep.errors import ConfigError

FORMAT = 1


@dataclass(frozen=True)
class Record:
    """Of one prediction."""

    run: str
    asked: str
    """The checkpoint, as it was asked for: newest, best or a step."""
    step: int
    weights: str
    """What the checkpoint's files are recognised by."""
    model: str
    script: str
    script_digest: str
    data: str
    data_digest: str
    num_files: int
    rows: int
    parts: int
    keep: list[str]
    finished: bool = False
    format: int = FORMAT

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str, where: str) -> Record:
        try:
            raw = json.loads(text)
            if raw["format"] != FORMAT:
                raise ValueError(f"its format is {raw['format']!r}, this keepstep's is {FORMAT}")
            return cls(**raw)
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{where} cannot be used ({error}); give another --output") from None

    def check_same(self, now: Record, where: str) -> None:
        """Raises, with what differs, if parts of both would not belong together."""
        differences = [
            f"{what} ({old}, now {new})" if old != new else f"{what} ({old}, which has changed)"
            for what, is_same, old, new in (
                ("the data", self.data_digest == now.data_digest, self._data(), now._data()),
                ("the checkpoint", self.weights == now.weights, self._checkpoint(), now._checkpoint()),
                ("the model", self.model == now.model, self.model, now.model),
                ("the script", self.script_digest == now.script_digest, self.script, now.script),
                ("--keep", self.keep == now.keep, ",".join(self.keep), ",".join(now.keep)),
            )
            if not is_same
        ]
        if differences:
            raise ConfigError(f"{where} was begun otherwise: {'; '.join(differences)}; give another --output")

    def _data(self) -> str:
        return f"{self.rows:,} rows in {self.num_files} files, {self.data}"

    def _checkpoint(self) -> str:
        return f"step {self.step} of {self.run}"
