"""Writes a trained voice as a custom-voice model: `Qwen3TTSModel.from_pretrained(folder).generate_custom_voice(...)`.

python export.py --run runs/NAME --output voice/voice-anna
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from model import merge_lora
from qwen import TRAINED_FROM, TRAINED_LANGUAGE, TRAINED_STREAMING, identity, import_qwen_tts, local_folder
from rows import write_rows
from safetensors.torch import load_file, save_file
from torch import Tensor
from train import ABOUT, WEIGHTS
from voice_folder import CONSENT, HELD_OUT

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_NOT_COPIED = (".safetensors", ".bin", ".index.json", ".md", ".gitattributes")


def export_voice(
    run_folder: Path, output: Path, base_model: str | None = None, dtype: str = "bf16", overwrite: bool = False
) -> Path:
    """The base model's folder with the trained weights, every speaker named, and a card; there whole or not at all."""
    about, state = read_run(run_folder)
    base = local_folder(base_model or about["base_model"])
    if identity(base) != about["base_identity"]:
        raise ValueError(f"{base} is not the base model that the run was trained from: give that one as --model-path")
    if output.exists() and not overwrite:
        raise ValueError(f"{output} is there already: name another --output, or give --overwrite")
    if output.exists() and not (output / CONSENT).is_file():
        raise ValueError(f"{output} is there, and no voice that export.py wrote: name another --output, or remove it")
    beside = output.with_name(f".{output.name}.writing")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        shutil.copytree(base, beside, ignore=_weights_and_cards)
        save_file(custom_voice_weights(state, DTYPES[dtype]), beside / "model.safetensors", metadata={"format": "pt"})
        settings = custom_voice_config(json.loads((base / "config.json").read_text()), about, dtype)
        (beside / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
        (beside / "README.md").write_text(model_card(about, read_figures(run_folder)))
        if about["held_out"]:
            write_rows(beside / HELD_OUT, about["held_out"])
        (beside / CONSENT).write_text(json.dumps(about["consent"], indent=2) + "\n")
        check(beside, settings)
        if output.exists():
            shutil.rmtree(output)
        beside.replace(output)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return output


def read_run(run_folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    artifacts = run_folder / "artifacts"
    for name in (ABOUT, WEIGHTS):
        if not (artifacts / name).is_file():
            raise ValueError(
                f"{artifacts / name} is not there: name the folder of a run of train.py that has validated once"
            )
    return json.loads((artifacts / ABOUT).read_text()), load_file(artifacts / WEIGHTS)


def read_figures(run_folder: Path) -> dict[str, float]:
    """The validation of the epoch that was best."""
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    validated = [line for line in lines if "validation_loss" in line]
    best = min(validated, key=lambda line: line["validation_loss"], default={})
    return {name: value for name, value in best.items() if name.startswith("validation_")} | {
        "step": best.get("step", 0)
    }


def custom_voice_weights(state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    merged = merge_lora(dict(state))
    return {name: value.to(dtype).contiguous() for name, value in merged.items()}


def custom_voice_config(settings: dict[str, Any], about: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The base model's configuration with its own voices in place of the speaker encoder."""
    talker = settings["talker_config"] | {
        # Looked up in lower case, whatever the case they are asked for in.
        "spk_id": {speaker.lower(): speaker_id for speaker, speaker_id in about["speakers"].items()},
        "spk_is_dialect": dict.fromkeys((speaker.lower() for speaker in about["speakers"]), False),
    }
    named = {"bf16": "bfloat16", "fp32": "float32"}[dtype]
    made = {"tts_model_type": "custom_voice", "talker_config": talker, "dtype": named}
    trained = {
        TRAINED_STREAMING: about["streaming"],
        TRAINED_LANGUAGE: about["language"],
        TRAINED_FROM: about["base_model"],
    }
    return settings | made | trained


def check(folder: Path, settings: dict[str, Any]) -> None:
    """That the folder has every weight that the model asks for and no other, of the right shape."""
    import_qwen_tts()
    from qwen_tts.core.models import Qwen3TTSConfig, Qwen3TTSForConditionalGeneration
    from safetensors import safe_open

    with torch.device("meta"):
        expected = Qwen3TTSForConditionalGeneration(Qwen3TTSConfig.from_pretrained(str(folder))).state_dict()
    with safe_open(folder / "model.safetensors", "pt") as file:
        found = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    wanted = {name: list(value.shape) for name, value in expected.items()}
    if found != wanted:
        differing = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
        raise ValueError(
            f"the run's weights are not those of {settings.get('tts_model_size')}: {len(differing)} differ, first "
            f"{differing[0]} (found {found.get(differing[0])}, expected {wanted.get(differing[0])}); "
            "give the --model-path that it was trained from"
        )


def model_card(about: dict[str, Any], figures: Mapping[str, float]) -> str:
    consent, data, speakers = about["consent"], about["data"], ", ".join(about["speakers"])
    return _CARD.format(
        base=about["base_model"],
        how=f"LoRA of rank {about['lora_rank']}, merged" if about["lora_rank"] else "all weights of the talker",
        speakers=speakers,
        speaker=next(iter(about["speakers"])),
        language=about["language"],
        mode=", non_streaming_mode=False" if about["streaming"] else "",
        data=f"{data['utterances']} utterances, {data['minutes']} minutes, of {speakers}",
        consent=f"on {consent['date']}{': ' + consent['note'] if consent['note'] else ''}",
        judged="held-out" if about["held_out"] else "training (none were held out)",
        figures="\n".join(f"| {name.replace('_', ' ')} | {value:.4g} |" for name, value in figures.items()),
    )


_CARD = """---
base_model: {base}
library_name: qwen-tts
pipeline_tag: text-to-speech
tags: [voice-cloning, synthetic-speech, keepstep]
---
# A custom voice: {speakers}

Fine-tuned with keepstep from `{base}` ({how}).
What it says is synthetic speech: say so where it is used.

```python
from qwen_tts import Qwen3TTSModel

model = Qwen3TTSModel.from_pretrained("this folder")
wavs, rate = model.generate_custom_voice("Hello.", speaker="{speaker}", language="{language}"{mode})
```

## Data and consent

{data}. Consent was stated {consent}.
Use is limited to what the speakers agreed to, and by the base model's licence.

## Figures

Of the {judged} texts, by the weights that are exported:

| | |
|---|---|
{figures}
"""


def _weights_and_cards(_folder: str, names: list[str]) -> list[str]:
    """The base model's own weights stay behind; but what lies in folders, as the codec, is taken along whole."""
    if Path(_folder).name == "speech_tokenizer":
        return []
    return [name for name in names if name.endswith(_NOT_COPIED) or name == ".cache"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder of the run of train.py")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--model-path", help="the base model, if it has moved since (default: as it was trained from)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the weights (default: %(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="in the place of a voice that is at --output")
    args = parser.parse_args(argv)
    try:
        folder = export_voice(args.run, args.output, args.model_path, args.dtype, args.overwrite)
    except ValueError as error:
        sys.exit(f"export.py: {error}")
    speakers = ", ".join(json.loads((folder / "config.json").read_text())["talker_config"]["spk_id"])
    print(f"written: {folder}, with the voice of {speakers}")


if __name__ == "__main__":
    main()
