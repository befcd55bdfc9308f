"""Loads the recipes' modules by path: three of them are called `data`, three `model`, three `train`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

RECIPES = Path(__file__).parents[3] / "recipes"

LoadRecipe = Callable[[str, str], ModuleType]


def _load(recipe: str, module: str) -> ModuleType:
    name = f"recipe_{recipe}_{module}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, RECIPES / recipe / f"{module}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture
def load_recipe(monkeypatch: pytest.MonkeyPatch) -> LoadRecipe:
    """`load_recipe("gpt", "data")` is recipes/gpt/data.py; scripts find their siblings as they do when they are run."""

    def load(recipe: str, module: str) -> ModuleType:
        if module in ("train", "predict"):
            for sibling in ("model", "data"):
                monkeypatch.setitem(sys.modules, sibling, _load(recipe, sibling))
        return _load(recipe, module)

    return load


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own, and no data folder in the environment."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("KEEPSTEP_DATA", raising=False)
    return tmp_path / "cache" / "keepstep"
