"""The loss is right if it asks for what generation does: fed generated codes, its arg-max is those codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from layout import Vocabulary, build_sample, collate, prompt
from model import SUB_TALKER_WEIGHT, VoiceModel, add_lora, merge_lora
from qwen import load_voice_model
from torch import Tensor

TEXT = "Hello there, my friend."
SPEAKER_ID = 64 + 952


@pytest.fixture(scope="module")
def whole(tiny_model: Path) -> Any:
    """The tiny model with larger weights, so that it says many different codes, and with a voice of its own."""
    model = load_voice_model(str(tiny_model))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.model.talker.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    talker = model.model.config.talker_config
    talker.spk_id, talker.spk_is_dialect = {"anna": SPEAKER_ID}, {"anna": False}
    return model


def generate_greedily(whole: Any, language: str, streaming: bool, max_new_tokens: int = 40) -> np.ndarray:
    ids = whole.processor(text=prompt(TEXT), return_tensors="pt", padding=True)["input_ids"]
    codes, _ = whole.model.generate(
        input_ids=[ids],
        languages=[language],
        speakers=["anna"],
        non_streaming_mode=not streaming,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        subtalker_dosample=False,
        repetition_penalty=1.0,
    )
    return codes[0].numpy()


def sample_of(whole: Any, codes: np.ndarray, language: str = "auto", streaming: bool = False) -> dict[str, Tensor]:
    ids = whole.processor.tokenizer(prompt(TEXT)).input_ids
    return build_sample(ids, codes, SPEAKER_ID, Vocabulary.of(whole.model.config), language, streaming)


def forced(whole: Any, sample: dict[str, Tensor], late_by: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(first codes, other codes) that are most likely, given the codes before; `late_by` 1 has seen the answer."""
    model = VoiceModel(whole.model.talker).eval()
    with torch.no_grad():
        hidden = model.hidden_states(collate([sample]))[0]
        start, length = int(sample["start"]), int(sample["length"])
        frames = sample["codes"][start:]
        before = hidden[start - 1 + late_by : length - 1 + late_by]
        logits = whole.model.talker.codec_head(before)[:, :64]  # generation suppresses what is no code
        others = model.sub_talker_logits(before, frames)
    return logits.argmax(-1).numpy(), others.argmax(-1).numpy()


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("language", ["auto", "english"])
def test_the_loss_asks_for_what_generation_does(whole: Any, language: str, streaming: bool) -> None:
    codes = generate_greedily(whole, language, streaming)
    assert len(np.unique(codes)) > 20  # not one code again and again
    first, others = forced(whole, sample_of(whole, codes, language, streaming))
    assert (first == codes[:, 0]).all()
    assert (others == codes[:, 1:]).all()


def test_another_layout_or_alignment_would_be_noticed(whole: Any) -> None:
    codes = generate_greedily(whole, "auto", streaming=False)
    first, others = forced(whole, sample_of(whole, codes), late_by=1)
    assert (first == codes[:, 0]).mean() < 0.5
    # The first of them, of which the state says most: later ones hang on those before, which are the right ones here.
    assert (others[:, 0] == codes[:, 1]).mean() < 0.5
    first, _ = forced(whole, sample_of(whole, codes, streaming=True))
    assert (first == codes[:, 0]).mean() < 0.9


def test_labels_and_losses_are_of_frames_and_the_end(whole: Any) -> None:
    codes = np.arange(5 * 16).reshape(5, 16) % 64
    sample = sample_of(whole, codes)
    labels = sample["labels"][sample["labels"] >= 0].tolist()
    assert labels == [*codes[:, 0].tolist(), whole.model.config.talker_config.codec_eos_token_id]
    model = VoiceModel(whole.model.talker).eval()
    with torch.no_grad():
        losses = model(collate([sample]))
        hidden = model.hidden_states(collate([sample]))[0, : int(sample["length"])]
    start = int(sample["start"])
    talker = torch.log_softmax(whole.model.talker.codec_head(hidden[start - 1 :]), -1)
    expected = -talker[torch.arange(6), torch.tensor(labels)].sum()
    others = torch.log_softmax(model.sub_talker_logits(hidden[start - 1 : -1], torch.tensor(codes)), -1)
    expected_others = -others.gather(2, torch.tensor(codes[:, 1:])[..., None]).squeeze(-1).mean(1).sum()
    torch.testing.assert_close(losses.talker[0], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(losses.sub_talker[0], expected_others, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(losses.total, losses.talker + SUB_TALKER_WEIGHT * losses.sub_talker)
    assert losses.frames.tolist() == [6]


def test_filler_changes_nothing(whole: Any) -> None:
    generator = np.random.default_rng(0)
    samples = [sample_of(whole, generator.integers(0, 64, (length, 16))) for length in (3, 17, 9)]
    model = VoiceModel(whole.model.talker).eval()
    with torch.no_grad():
        together = model(collate(samples))
        alone = [model(collate([sample])) for sample in samples]
    for name in ("talker", "sub_talker", "frames", "right"):
        one_by_one = torch.cat([getattr(losses, name) for losses in alone])
        torch.testing.assert_close(getattr(together, name), one_by_one, rtol=1e-4, atol=1e-3)


def test_no_utterances_make_no_losses(whole: Any) -> None:
    """A worker may have no share of the last held-out texts, and must run all layers even so."""
    batch = collate([sample_of(whole, np.zeros((4, 16), dtype=int))])
    model = VoiceModel(whole.model.talker).eval()
    seen = []
    handle = model.talker.model.layers[0].register_forward_hook(lambda *_: seen.append(True))
    losses = model({name: value[:0] for name, value in batch.items()})
    handle.remove()
    assert seen and all(part.shape == (0,) for part in losses)


def test_text_talker_and_sub_talker_may_be_of_three_widths(whole: Any) -> None:
    """As in the 1.7 B model: the layers that lie between are tested by all that is tested here."""
    talker = whole.model.talker
    assert isinstance(talker.code_predictor.small_to_mtp_projection, torch.nn.Linear)
    config = talker.config
    assert len({config.text_hidden_size, config.hidden_size, config.code_predictor_config.hidden_size}) == 3


def test_an_unknown_language_is_named(whole: Any) -> None:
    with pytest.raises(ValueError, match="'klingon' is not one of the model's: auto, chinese, english, german"):
        sample_of(whole, np.zeros((2, 16), dtype=int), "klingon")


def test_lora_starts_as_the_model_and_merges_into_it(tiny_model: Path) -> None:
    model = VoiceModel(load_voice_model(str(tiny_model)).model.talker)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    add_lora(model, rank=4)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained and all(".lora_" in name for name in trained)
    merged = merge_lora(model.state_dict())
    assert merged.keys() == before.keys()
    assert all(torch.equal(merged[name], before[name]) for name in before)
    name = "talker.model.layers.0.self_attn.q_proj"
    layer = model.get_submodule(name)
    torch.nn.init.normal_(layer.lora_B["default"].weight)
    x = torch.randn(3, layer.in_features)
    torch.testing.assert_close(x @ merge_lora(model.state_dict())[f"{name}.weight"].T, layer(x), rtol=1e-4, atol=1e-5)


def test_it_learns_two_utterances_by_heart(tiny_model: Path) -> None:
    """Trained on two utterances it says them: of all codes of all codebooks, generated greedily, 0.95 and more."""
    model = load_voice_model(str(tiny_model))
    talker = model.model.config.talker_config
    talker.spk_id, talker.spk_is_dialect = {"anna": SPEAKER_ID}, {"anna": False}
    vocabulary, tokenizer = Vocabulary.of(model.model.config), model.processor.tokenizer
    generator = np.random.default_rng(0)
    said = {text: generator.integers(0, 64, (12, 16)) for text in ("One thing.", "Quite another thing.")}
    batch = collate(
        [build_sample(tokenizer(prompt(text)).input_ids, codes, SPEAKER_ID, vocabulary) for text, codes in said.items()]
    )
    trained = VoiceModel(model.model.talker).train()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=3e-3)
    for _ in range(250):
        losses = trained(batch)
        (losses.total.sum() / losses.frames.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    trained.eval()
    for text, codes in said.items():
        ids = model.processor(text=prompt(text), return_tensors="pt", padding=True)["input_ids"]
        (made,), _ = model.model.generate(
            input_ids=[ids],
            languages=["auto"],
            speakers=["anna"],
            non_streaming_mode=True,
            max_new_tokens=40,
            do_sample=False,
            subtalker_dosample=False,
            repetition_penalty=1.0,
        )
        assert len(made) == len(codes)  # it also knows where to end
        assert (made.numpy() == codes).mean() >= 0.95
