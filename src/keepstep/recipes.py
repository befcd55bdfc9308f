"""The recipes: finds them, whether installed or in a checkout, and copies one out as a project."""

from __future__ import annotations

import shutil
from pathlib import Path

from keepstep.errors import ConfigError

_INSTALLED = Path(__file__).parent / "_recipes"
_CHECKOUT = Path(__file__).parents[2] / "recipes"


def recipes_root() -> Path:
    return _INSTALLED if _INSTALLED.is_dir() else _CHECKOUT


def recipe_folder(name: str) -> Path:
    """Where a recipe lies; a wrong name is answered with the right ones."""
    folder = recipes_root() / name
    if not (folder / "train.py").is_file() or Path(name).name != name:
        known = sorted(path.parent.name for path in recipes_root().glob("*/train.py"))
        raise ConfigError(f"there is no recipe {name!r}; there are {', '.join(known)}")
    return folder


def copy_recipe(name: str, target: Path) -> int:
    """`keepstep new`: a folder of one's own to begin with."""
    source = recipe_folder(name)
    if target.exists() and any(target.iterdir() if target.is_dir() else [target]):
        raise ConfigError(f"{target} is there already and not empty; give another folder: keepstep new {name} FOLDER")
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    print(f"{target}: {', '.join(sorted(path.name for path in target.iterdir()))}")
    print(f"next: cd {target} && keepstep run train.py")
    return 0
