"""Which values a parameter of a search may take, how one is drawn, and how a good one is changed a little."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

Value = bool | int | float | str

_DIGITS = 4
"""Of a drawn number: enough to tell trials apart, few enough to type again."""
_FACTORS = (0.8, 1.2)
_RESAMPLED = 0.25
"""How often a perturbed value is drawn anew instead: both as in Ray Tune's population based training."""


@dataclass(frozen=True)
class Domain:
    """`lr=loguniform(1e-5,1e-2)`: a name, a kind and what stands in its brackets."""

    name: str
    kind: str
    arguments: tuple[Value, ...]

    def __str__(self) -> str:
        """As it was given, to the meaning."""
        return f"{self.name}={self.kind}({','.join(map(repr, self.arguments))})"

    @property
    def is_list(self) -> bool:
        return self.kind in ("choice", "grid")

    @property
    def is_logarithmic(self) -> bool:
        return self.kind == "loguniform"

    def draw(self, source: random.Random) -> Value:
        if self.is_list:
            return source.choice(self.arguments)
        low, high, *_ = self._numbers
        if self.kind == "randint":
            return source.randrange(int(low), int(high))
        if self.kind == "loguniform":
            return self._fitted(math.exp(source.uniform(math.log(low), math.log(high))))
        return self._fitted(source.uniform(low, high))

    def perturb(self, value: Value, source: random.Random) -> Value:
        """A value near a good one, still within the bounds."""
        if source.random() < _RESAMPLED or (self.is_list and value not in self.arguments):
            return self.draw(source)
        if self.is_list:
            place = self.arguments.index(value) + source.choice((-1, 1))
            return self.arguments[min(max(place, 0), len(self.arguments) - 1)]
        assert isinstance(value, (int, float))
        return self._fitted(value * source.choice(_FACTORS))

    @property
    def _numbers(self) -> tuple[float, ...]:
        return tuple(number for number in self.arguments if isinstance(number, (int, float)))

    def _fitted(self, number: float) -> Value:
        low, high, *step = self._numbers
        if self.kind == "randint":
            return min(max(round(number), int(low)), int(high) - 1)
        if step:
            fewest, most = math.ceil(low / step[0] - 1e-9), math.floor(high / step[0] + 1e-9)
            multiple = min(max(round(number / step[0]), fewest), most) * step[0]
            is_whole = all(isinstance(argument, int) for argument in self.arguments)
            return int(multiple) if is_whole else float(f"{multiple:.12g}")
        return min(max(float(f"{number:.{_DIGITS}g}"), float(low)), float(high))
