"""The user's file: the model to make, and what to do with a batch."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from keepstep.errors import ConfigError, KeepstepError
from keepstep.predict.columns import Batch

_MODULE = "keepstep_predict_script"
_TO_DEFINE = "it must define make_model() -> nn.Module and predict(model, batch: dict[str, np.ndarray]) -> the same"


class Script:
    """A file that defines `make_model()` and `predict(model, batch)`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._module = _imported(path)
        for name in ("make_model", "predict"):
            if not callable(getattr(self._module, name, None)):
                raise ConfigError(f"{path} has no function {name}; {_TO_DEFINE}")

    def make_model(self) -> nn.Module:
        try:
            model = self._module.make_model()
        except Exception as error:
            raise ConfigError(f"make_model: {self.described(error)}") from error
        if not isinstance(model, nn.Module):
            raise ConfigError(f"make_model of {self.path} returned a {type(model).__name__}; {_TO_DEFINE}")
        return model

    def predict(self, model: nn.Module, batch: Batch, rows: int) -> dict[str, np.ndarray[Any, Any]]:
        """What the user's function returns; raises whatever it raises, and ConfigError for what cannot be written."""
        with torch.inference_mode():
            returned = self._module.predict(model, batch)
        if not isinstance(returned, dict) or not returned:
            found = "an empty dict" if returned == {} else f"a {type(returned).__name__}"
            raise ConfigError(f"predict returned {found}; a dict of column name → NumPy array was expected")
        for name, array in returned.items():
            _check(name, array, rows)
        return returned

    def described(self, error: BaseException) -> str:
        """An exception of the user's code, in one line: where in this file, and what."""
        lines = [
            frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == self.path
        ]
        where = f"line {lines[-1]}: " if lines else ""
        return f"{self.path.name} {where}{_in_one_line(error)}"


def _imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is no Python file; {_TO_DEFINE}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module  # dataclasses and pickle look a function's module up
    if sys.path[:1] != [str(path.parent)]:  # it stays: the script may import its neighbours later, too
        sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except KeepstepError:
        raise
    except Exception as error:
        raise ConfigError(f"{path} cannot be imported: {_in_one_line(error)}") from error
    return module


def _check(name: object, array: object, rows: int) -> None:
    if not isinstance(name, str):
        raise ConfigError(f"predict returned a column named {name!r}; a text was expected")
    if not isinstance(array, np.ndarray):
        hint = "; .cpu().numpy() makes one of a tensor" if isinstance(array, torch.Tensor) else ""
        raise ConfigError(f"predict returned {name!r} as a {type(array).__name__}; a NumPy array was expected{hint}")
    if array.ndim == 0 or len(array) != rows:
        found = "a single value" if array.ndim == 0 else f"{len(array)} values"
        raise ConfigError(f"predict returned {found} of {name!r} for {rows} rows; one a row was expected")


def _in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".rstrip(": ")
