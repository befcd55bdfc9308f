"""Where a model comes from: a folder, or the hub by its id."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
from qwen import BASE_MODELS, load_codec, load_voice_model, local_folder


def test_a_hub_id_is_loaded_from_where_the_hub_keeps_it(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def snapshot_download(repo_id: str) -> str:
        asked.append(repo_id)
        return str(tiny_model)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert load_voice_model(BASE_MODELS[0]).model.tts_model_type == "base"
    assert load_codec(BASE_MODELS[1]).num_codebooks == 16
    assert asked == list(BASE_MODELS)


def test_what_the_hub_does_not_give_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(repo_id: str) -> str:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ValueError, match=r"Qwen/None is no folder here, and the hub did not give it: no network"):
        local_folder("Qwen/None")


def test_a_folder_is_never_looked_for_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo_id: pytest.fail(f"asked for {repo_id}"))
    with pytest.raises(ValueError, match=r"has no config\.json: name the folder of a Qwen3-TTS model"):
        local_folder(str(tmp_path))
    for absent in (str(tmp_path / "absent"), "./voice/base", "some/where/else"):
        with pytest.raises(ValueError, match="is not there"):
            local_folder(absent)
