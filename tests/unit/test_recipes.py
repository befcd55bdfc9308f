"""Recipes are found by name and copied out whole."""

from __future__ import annotations

import filecmp
from pathlib import Path

import pytest

from keepstep import recipes
from keepstep.errors import ConfigError
from keepstep.recipes import copy_recipe, recipe_folder, recipes_root

NAMES = ["gpt", "resnet_mnist", "vit_cifar10"]


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_a_whole_project(name: str) -> None:
    folder = recipe_folder(name)
    assert all((folder / file).is_file() for file in ("train.py", "model.py", "data.py", "README.md"))


@pytest.mark.parametrize("name", ["gtp", "", ".", "..", "../recipes/gpt", "gpt/", "/etc"])
def test_a_wrong_name_is_answered_with_the_right_ones(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        recipe_folder(name)
    assert f"there is no recipe {name!r}; there are " in str(error.value)
    assert all(known in str(error.value) for known in NAMES)


def test_a_copy_is_the_recipe_without_what_python_left_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "recipes" / "mine"
    (source / "__pycache__").mkdir(parents=True)
    (source / "train.py").write_text("print('hello')")
    (source / "data.py").write_text("")
    monkeypatch.setattr(recipes, "recipes_root", lambda: tmp_path / "recipes")
    target = tmp_path / "project"
    assert copy_recipe("mine", target) == 0
    assert sorted(path.name for path in target.iterdir()) == ["data.py", "train.py"]
    assert filecmp.cmp(source / "train.py", target / "train.py", shallow=False)
    assert capsys.readouterr().out == (f"{target}: data.py, train.py\nnext: cd {target} && keepstep run train.py\n")


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    copy_recipe("gpt", tmp_path / "project")
    assert (tmp_path / "project" / "train.py").is_file()


@pytest.mark.parametrize("is_file", [True, False])
def test_what_is_there_already_is_not_written_over(tmp_path: Path, is_file: bool) -> None:
    target = tmp_path / "project"
    if is_file:
        target.write_text("mine")
    else:
        target.mkdir()
        (target / "train.py").write_text("mine")
    with pytest.raises(
        ConfigError, match="is there already and not empty; give another folder: keepstep new gpt FOLDER"
    ):
        copy_recipe("gpt", target)
    assert (target if is_file else target / "train.py").read_text() == "mine"


def test_an_installed_package_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert recipes_root().name == "recipes"
    monkeypatch.setattr(recipes, "_INSTALLED", tmp_path)
    assert recipes_root() == tmp_path
