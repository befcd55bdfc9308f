"""The demonstration's parts: a codec that the recipe loads like the real one, who says what, and a base model."""

from __future__ import annotations

import csv
import gzip
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audio import load_audio, write_wav
from data import speaker_ids
from layout import Batch, Vocabulary
from qwen import load_codec, load_voice_model
from rows import read_rows, write_rows
from safetensors.torch import load_file
from tiny import build_text_tokenizer, save_model
from voice.conftest import RECIPE
from voice.test_model import TEXT, generate_greedily

sys.path.insert(0, str(RECIPE / "demonstration"))
import fit_decoder
import guided
import listener
import mel_codec
import pretrain
import quantizer
import sentences
import target
import voices
from mel_codec import FLOOR, MelCodecConfig, MelCodecModel, mel_spectrogram, save_codec, train_codec
from voices import TICK_S, all_voices, characters_said, plan

from keepstep import current

NOUNS = ("dog", "door", "house", "river", "hill")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("codec")
    codec = MelCodecModel(MelCodecConfig(codebook_size=32, width=16, latent=8)).eval()
    torch.nn.init.normal_(codec.directions)  # not yet trained, it hears nothing
    save_codec(codec, path)
    return path


def test_it_is_loaded_as_the_real_codec_is(folder: Path) -> None:
    codec = load_codec(str(folder))
    assert (codec.num_codebooks, codec.codebook_size, codec.sample_rate_hz) == (8, 32, 22_050)
    drawn = np.random.default_rng(0)
    wavs = [drawn.normal(0, 0.1, length).astype(np.float32) for length in (30_000, 9_000, 52_345)]
    together = codec.encode(wavs)
    assert [len(codes) for codes in together] == [-(-len(wav) // codec.samples_per_frame) for wav in wavs]
    for wav, codes in zip(wavs, together, strict=True):
        assert (codec.encode([wav])[0] == codes).all()
        assert len(np.unique(codes)) > 8


def test_it_learns_to_give_back_what_it_was_given() -> None:
    torch.manual_seed(0)
    time = torch.arange(44_100) / 22_050
    mels = [mel_spectrogram(0.3 * torch.sin(2 * torch.pi * hertz * time * (1 + time))) for hertz in (150, 300, 700)]

    def error(codec: MelCodecModel) -> float:
        with torch.no_grad():
            made = [codec.decode_mel(codes) for codes in codec.encode_mels(mels)]
        heard = [mel.clamp(min=FLOOR) for mel in mels]
        return float(np.mean([(m[:, : mel.shape[1]] - mel).abs().mean() for m, mel in zip(made, heard, strict=True)]))

    settings = MelCodecConfig(codebook_size=16, width=64)
    spoken = [(mel, ["_", "a", "_"]) for mel in mels[:2]]
    before, after = (error(train_codec(spoken, mels[2:], steps, "cpu", 8, settings, 2)) for steps in (1, 120))
    assert after < 0.7 * before


def spoken_by(mouth: torch.Tensor, said: list[str]) -> torch.Tensor:
    """A spectrogram: each sound has bands of its own for two frames, and every mouth adds its own to all."""
    bands = {"_": range(0), "a": range(10, 20), "b": range(30, 45), "c": range(55, 70)}
    mel = torch.full((80, 14 * len(said)), FLOOR)
    for place, sound in enumerate(said):
        mel[list(bands[sound]), 14 * place : 14 * (place + 1)] = 0.0
    return mel + mouth[:, None]


def test_first_codes_say_which_sound_it_is_whoever_says_it() -> None:
    drawn = torch.Generator().manual_seed(0)
    mouths = torch.rand(6, 80, generator=drawn)

    def sentence() -> list[str]:
        return ["_", *("abc"[int(one)] for one in torch.randint(3, (12,), generator=drawn)), "_"]

    spoken = [(spoken_by(mouth, said), said) for mouth in mouths[:5] for said in (sentence() for _ in range(40))]
    codec = train_codec(spoken, [], 20, "cpu", 8, MelCodecConfig(codebook_size=16, width=48), listener_steps=400)
    # One that it has never heard says every sound after every other, in the others' codes.
    said = list("_abcacbabcacb_")
    meant: dict[str, Counter[int]] = {sound: Counter() for sound in "abc"}
    for mouth in mouths:
        (codes,) = codec.encode_mels([spoken_by(mouth, said)])
        for frame, code in enumerate(codes[:, 0].tolist()):
            if said[frame // 2] != "_":
                meant[said[frame // 2]][code] += 1
    often = {sound: {code for code, times in counts.items() if times > 2} for sound, counts in meant.items()}
    assert all(often.values())
    assert not any(often[one] & often[other] for one, other in ("ab", "ac", "bc"))


def test_each_of_a_batch_gets_a_mouth_of_its_own_size() -> None:
    rising = torch.arange(80.0)[:, None].expand(80, 3)
    made = listener.warped(torch.stack([rising] * 8), torch.Generator().manual_seed(0))
    sizes = made[:, 40, 0] / 40
    assert len(set(sizes.tolist())) == 8
    assert (sizes - 1).abs().max() < listener.WARP and sizes.min() < 1 < sizes.max()
    expected = (sizes[:, None] * torch.arange(80)).clamp(max=79)[..., None].expand(8, 80, 3)
    torch.testing.assert_close(made, expected)


def test_first_codes_are_given_and_the_others_say_what_is_left() -> None:
    torch.manual_seed(0)
    made = quantizer.ResidualQuantizer(2, 4, 3)
    z, first = torch.randn(400, 3), torch.randint(4, (400,))
    made.start(z, first)
    for _ in range(300):
        codes = made.learn(z, first)
    assert (codes[:, 0] == first).all() and (made.encode(z, first) == codes).all()
    means = torch.stack([z[first == code].mean(0) for code in range(4)])
    torch.testing.assert_close(made.codebooks[0], means, atol=0.02, rtol=0)
    left = (z - made.decode(codes[:, :1])).square().mean()
    assert (z - made.decode(codes)).square().mean() < 0.8 * left


def test_sounds_are_those_of_the_dictionary_with_pauses_around_clauses(tmp_path: Path, monkeypatch: Any) -> None:
    said = "ɡ_ˈɪ_v ð_ə k_ˈæ_m__ɹ_ə\nɪ_n_s_ˈaɪ_d"  # noqa: RUF001, as espeak-ng 1.51 prints it
    command = tmp_path / "espeak-ng"
    command.write_text(f"#!/bin/sh\necho \"$@\" >> {tmp_path / 'asked'}\nprintf '{said}\\n'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    sounds = [*"_ɡɪvðəkæmɹə_ɪns", "aɪ", "d", "_"]  # noqa: RUF001
    assert listener.sounds_of(["Give the camera, inside", "-v"]) == [sounds, sounds]
    asked = (tmp_path / "asked").read_text().splitlines()
    assert sorted(line.split("en-us ")[1] for line in asked) == ["-- -v", "-- Give the camera, inside"]
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="espeak-ng is not installed: apt-get install espeak-ng"):
        listener.sounds_of(["Give"])


def test_who_says_what_is_as_planned() -> None:
    texts = [f"Sentence {number}." for number in range(50)]
    said = list(plan(texts, 2000))
    counts = Counter(voice.speaker for voice, _ in said)
    assert len(counts) == len(all_voices()) > 30
    assert counts["heart"] > counts["slt"] > counts["kal16"] > 0
    lengths = Counter(len(own) for _, own in said)
    assert lengths[1] > lengths[2] > lengths[3] > 0
    assert said == list(plan(texts, 2000))


def test_voices_can_be_chosen_by_name() -> None:
    chosen = voices.chosen_voices(["heart", "rms-1.07"])
    said = list(plan(["One.", "Two.", "Three."], 10, voices=chosen, most_sentences=1))
    assert Counter(voice.speaker for voice, _ in said) == {"heart": 5, "rms-1.07": 5}
    assert all(len(own) == 1 for _, own in said)
    with pytest.raises(ValueError, match="there is no voice hart; there are heart, slt"):
        voices.chosen_voices(["hart"])


def test_some_utterances_have_their_words_in_any_order() -> None:
    texts = [
        f"The first of {number} words, isn't it?" for number in ("one", "two", "three", "four", "five", "six", "seven")
    ]
    said = [own for _, own in plan(texts, 1000, most_sentences=1, shuffled=0.25)]
    in_order = sum(own[0] in texts for own in said)
    assert 0.7 < in_order / len(said) < 0.8
    words = {tuple(sorted(sentences.words_of(text))) for text in texts}
    assert {tuple(sorted(sentences.words_of(own[0]))) for own in said} == words
    assert len({own[0] for own in said}) > 200


def test_no_sentence_is_in_two_files_and_held_out_words_are_known(tmp_path: Path, monkeypatch: Any) -> None:
    pairs = [(noun, place) for noun in NOUNS for place in NOUNS]
    examples = [f'"a {colour} {noun} stood by the {place}"' for colour in ("red", "blue") for noun, place in pairs]
    gloss = "\n".join(f"0001 | something; {example}; 12" for example in [*examples, '"an ibex leapt away quickly"'])
    (tmp_path / "data.noun").write_text(gloss)
    everyday = sentences.everyday_sentences(tmp_path)
    assert everyday[0] == "A red dog stood by the dog." and len(everyday) == 2 * len(NOUNS) ** 2 + 1
    files = sentences.divided(everyday, sentences.simple_sentences(200), target_everyday=30, target_simple=40)
    train_simple = files.pop("train_simple.txt")
    assert len(train_simple) == 140 and set(train_simple) < set(files["train.txt"])
    assert {name: len(texts) for name, texts in files.items()} == {
        "train.txt": len(everyday) - 20 - 30 + 140,
        "target.txt": 70,
        "held_out_everyday.txt": 20,
        "held_out_simple.txt": 20,
    }
    assert len({text for texts in files.values() for text in texts}) == len(everyday) + 200
    known = sentences.known_words(everyday)
    assert "ibex" not in known
    assert all(known.issuperset(sentences.words_of(text)) for text in files["held_out_everyday.txt"])
    monkeypatch.setattr(sentences, "everyday_sentences", lambda: everyday)
    given = ["--target-everyday", "30", "--target-simple", "40"]
    sentences.main(["--output", str(tmp_path / "texts"), *given])
    assert (tmp_path / "texts" / "target.txt").read_text().count("\n") == 70


def test_letters_take_the_same_time_each_and_pauses_none() -> None:
    tone, pause = np.sin(np.arange(8000)).astype(np.float32), np.zeros(8000, np.float32)
    said = characters_said(np.concatenate([tone, pause, tone]), 20)
    assert said[[4000, 8000, 12_000, 15_500, 20_000, -1]] == pytest.approx([5, 10, 10, 10, 15, 20], abs=0.3)


def test_a_voice_says_its_sentences_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def tone(_name: str, text: str) -> tuple[np.ndarray, int]:
        return np.sin(np.arange(1000 * len(text))).astype(np.float32), 16_000

    monkeypatch.setattr(voices, "_flite", tone)
    for shift in (1.0, 1.25):  # played faster, it is said earlier
        wav, rate, said = voices.synthesise(voices.Voice("flite", "slt", shift), ["Nine char", "Nine more"])
        assert rate == 16_000 * shift
        sentence_s, total_s = 9000 / rate, len(wav) / rate
        assert total_s == pytest.approx(2 * sentence_s + voices.PAUSE_S, abs=0.02)
        assert len(said) == int(total_s / TICK_S) + 1 and said == sorted(said)
        at = [said[round(moment / TICK_S)] for moment in (0.0, sentence_s / 2, sentence_s + 0.15)]
        assert [*at, said[-1]] == pytest.approx([0, 5, 10, 20], abs=2)


def test_a_role_is_one_token_however_long_the_text_and_few_the_tokens() -> None:
    tokenizer = build_text_tokenizer(" ".join(TEXTS) * 3000, vocab_size=280)
    assert len(tokenizer("<|im_start|>assistant\n").input_ids) == 3


# ---- the base model


TEXTS = ("The quick brown fox jumps over the lazy dog.", "She sells sea shells.", "Printing, in the only sense.")


def write_corpus(folder: Path) -> None:
    """24 utterances of two speakers as voices.py writes them: noise, but whole."""
    folder.mkdir()
    drawn = np.random.default_rng(0)
    rows, wavs = [], []
    for number in range(24):
        text = TEXTS[number % len(TEXTS)] + " Well." * (number // 3)
        num_samples = 22_050 * 2 + 1500 * number
        num_ticks = int(num_samples / 22_050 / TICK_S) + 1
        said = np.linspace(0, len(text), num_ticks).astype(int).tolist()
        rows.append({"speaker": "ab"[number % 2], "text": text, "samples": num_samples, "said": said})
        wavs.append(drawn.normal(0, 3000, num_samples).astype(np.int16))
    np.save(folder / "00000.npy", np.concatenate(wavs))
    with gzip.open(folder / "00000.json.gz", "wt") as file:
        json.dump(rows, file)


SMALL = ("--hidden-size", "64", "--layers", "3", "--sub-talker-size", "64", "--sub-talker-layers", "1")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a codec and a corpus in its codes."""
    folder = tmp_path_factory.mktemp("demonstration")
    write_corpus(folder / "corpus")
    given = ["--corpus", str(folder / "corpus"), "--output", str(folder / "base")]
    steps = ["--codec-steps", "3", "--listener-steps", "2", "--codec-batch", "4", "--codec-share", "1"]
    small = ["--codebook-size", "32", "--codebooks", "6", "--codec-width", "16"]
    with pytest.MonkeyPatch.context() as patched:
        # espeak-ng is a program of its own: here letters are sounds.
        patched.setattr(pretrain, "sounds_of", lambda texts: [list(text.lower()) for text in texts])
        pretrain.main(["codec", *given, *steps, *small])
    pretrain.main(["codes", *given, "--vocab-size", "300"])
    return folder / "base"


def test_the_corpus_does_not_go_with_the_model(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(base)
    assert pretrain.corpus_codes(Path()) == pretrain.corpus_codes(base)
    assert {path.name for path in base.with_name("base-corpus").iterdir()} == {
        pretrain.CODES,
        pretrain.VOICES,
        pretrain.ABOUT,
    }
    assert not {pretrain.CODES, pretrain.VOICES, pretrain.ABOUT} & {path.name for path in base.iterdir()}


def test_the_codec_also_hears_recordings_whose_text_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_corpus(tmp_path / "corpus")
    write_wav(tmp_path / "a.wav", np.sin(np.arange(24_000) / 9).astype(np.float32), 24_000)
    rows = tmp_path / "segments.jsonl"
    write_rows(rows, [{"audio": str(tmp_path / "a.wav"), "text": "Ab."}])
    heard: list[tuple[tuple[int, ...], list[str]]] = []

    def train_codec(spoken: Any, *_: Any) -> mel_codec.MelCodecModel:
        heard.extend((tuple(mel.shape), said) for mel, said in spoken)
        return mel_codec.MelCodecModel(MelCodecConfig(16, 2, 16))

    monkeypatch.setattr(pretrain, "train_codec", train_codec)
    monkeypatch.setattr(pretrain, "sounds_of", lambda texts: [list(text) for text in texts])
    words = ["codec", "--corpus", str(tmp_path / "corpus"), "--output", str(tmp_path / "base"), "--codec-share", "0"]
    pretrain.main([*words, "--spoken", str(rows)])
    assert heard == [((80, 22_050 // 256), ["A", "b", "."])]
    with pytest.raises(SystemExit, match=r"pretrain\.py: .*absent\.jsonl is not there"):
        pretrain.main([*words, "--spoken", str(tmp_path / "absent.jsonl")])


@pytest.fixture
def heard(base: Path) -> tuple[guided.BaseModel, guided.GuidedUtterances, Batch]:
    """A model not yet trained, the corpus, and a batch of it."""
    torch.manual_seed(0)
    args = pretrain.parse(["talker", "--output", str(base), *SMALL])
    whole, tokenizer = pretrain.build(args)
    whole.talker.config._attn_implementation = "eager"
    rows, pools = pretrain.load_rows(base)
    references, pieces = guided.table_of(pools)
    utterances = guided.GuidedUtterances(rows, tokenizer, Vocabulary.of(whole.config), pieces)
    batch = guided.collate_guided([utterances[index] for index in (0, 5, 17)])
    return guided.BaseModel(whole.talker, whole.speaker_encoder, references), utterances, batch


def test_a_voice_is_heard_from_its_own_pieces(heard: tuple[Any, Any, Batch]) -> None:
    model, utterances, _ = heard
    pools = {"a": torch.zeros(3, 5, 2), "b": torch.ones(2, 5, 2)}
    table, pieces = guided.table_of(pools)
    assert all((table[list(pieces[name])] == pool).all() for name, pool in pools.items())
    own = {int(utterances[index]["reference"]) for index in range(0, len(utterances), 2) for _ in range(20)}
    assert own == set(utterances._pieces["a"]) and len(own) == 12  # a piece of each utterance
    assert not own & set(utterances._pieces["b"])
    assert len(model.references) == len(utterances._pieces["a"]) + len(utterances._pieces["b"])
    assert "references" not in model.state_dict()


@pytest.fixture
def shipped_kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Qwen3-TTS's own module; what fewer_kernels replaces in it is put back when the test is over."""
    from qwen_tts.core.models import modeling_qwen3_tts as modeling

    monkeypatch.setattr(modeling.Qwen3TTSRMSNorm, "forward", modeling.Qwen3TTSRMSNorm.forward)
    monkeypatch.setattr(modeling, "apply_multimodal_rotary_pos_emb", modeling.apply_multimodal_rotary_pos_emb)
    return modeling


def test_fewer_kernels_make_the_same(
    heard: tuple[Any, Any, Batch], shipped_kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _, batch = heard
    with torch.no_grad():
        as_shipped = model.eval()(batch)
        guided.fewer_kernels()
        torch.testing.assert_close(model(batch), as_shipped)
        monkeypatch.setattr(shipped_kernels, "rotate_half", torch.zeros_like)  # it is these that run
        assert (model(batch).talker != as_shipped.talker).all()


def test_text_comes_in_before_it_is_said(heard: tuple[Any, Any, Batch]) -> None:
    """What is said in a frame has come by then; letters alone, 15 a second, would not have at 12 frames a second."""
    _, utterances, batch = heard
    for row, index in enumerate((0, 5, 17)):
        start, num_frames = int(batch["start"][row]), len(utterances.rows[index]["audio_codes"])
        predicting = torch.arange(start - 1, start - 1 + num_frames)
        first, last = batch["said_from"][row, predicting], batch["said_to"][row, predicting]
        assert (first <= last).all() and (first >= start - 1).all() and (last <= predicting).all()
        assert (first.diff() >= 0).all() and last[-1] > last[0] + 5
        others = torch.ones(batch["labels"].shape[1], dtype=torch.bool)
        others[predicting] = False
        assert (batch["said_from"][row, others] == -1).all()
    # By the end, the last tokens of the text are what is said.
    ends = utterances._ends[0]
    assert int(batch["said_to"][0].max()) == int(batch["start"][0]) - 1 + len(ends) - 1


def test_guidance_is_what_attention_gives_to_the_text_being_said(heard: tuple[Any, Any, Batch]) -> None:
    model, _, batch = heard
    with torch.no_grad():
        made = model.talker.model(
            inputs_embeds=model.eval()._embeddings(batch),
            use_cache=False,
            output_hidden_states=True,
            output_attentions=True,
        )
        measured = guided.guidance(model.talker.model, 1, made.hidden_states[1], batch)
    weights = made.attentions[1][:, 0]
    expected = []
    for row in range(len(weights)):
        places = torch.nonzero(batch["said_from"][row] >= 0)[:, 0].tolist()
        given = [
            weights[row, place, int(batch["said_from"][row, place]) : int(batch["said_to"][row, place]) + 1].sum()
            for place in places
        ]
        expected.append(-torch.stack(given).log().sum())
    torch.testing.assert_close(measured, torch.stack(expected), rtol=1e-4, atol=1e-3)


def test_guidance_is_part_of_what_is_trained_and_of_nothing_else(
    heard: tuple[Any, Any, Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _, batch = heard
    monkeypatch.setattr(guided, "FORGOTTEN", 0.0)
    with torch.no_grad():
        plain, trained = model.eval()(batch), model.train()(batch)
        made = model.talker.model(
            inputs_embeds=model._embeddings(batch), use_cache=False, output_hidden_states=True
        ).hidden_states
        added = sum(guided.guidance(model.talker.model, number, made[number], batch) for number in model._guided_layers)
    torch.testing.assert_close(trained.talker - plain.talker, guided.GUIDANCE_WEIGHT * added)
    torch.testing.assert_close(trained.sub_talker, plain.sub_talker)
    monkeypatch.setattr(model, "_sub_talker_share", 0.1)  # of the one frame that stands for nothing, too
    nothing = model({name: value[:0] for name, value in batch.items()})  # a worker's share of a small batch
    assert [len(part) for part in nothing] == [0, 0, 0, 0]


def test_past_frames_are_left_out_in_training_alone_and_never_the_text(heard: tuple[Any, Any, Batch]) -> None:
    model, _, batch = heard
    with torch.no_grad():
        whole = model.eval()._embeddings(batch)
        torch.testing.assert_close(whole, model._embeddings(batch))
        trained = model.train()._embeddings(batch)
        text = model.talker.text_projection(model.talker.get_text_embeddings()(batch["text_ids"]))
    is_frame = torch.arange(whole.shape[1]) >= batch["start"][:, None]
    changed = (trained != whole).any(-1)
    assert not (changed & ~is_frame).any()
    assert 0.05 < changed[is_frame].float().mean() < guided.FORGOTTEN
    torch.testing.assert_close(trained[changed], text[changed])


def test_a_share_of_the_frames_stands_for_all_of_them(
    heard: tuple[Any, Any, Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _, batch = heard
    monkeypatch.setattr(guided, "FORGOTTEN", 0.0)  # else that is random, too
    monkeypatch.setattr(model, "_sub_talker_share", 0.5)
    with torch.no_grad():
        everything = model.eval()(batch).sub_talker.sum()
        assert model(batch).sub_talker.sum() == everything  # not in training
        model.train()
        some = torch.stack([model(batch).sub_talker.sum() for _ in range(12)])
    assert some.std() > 0
    assert some.mean() == pytest.approx(float(everything), rel=0.1)


def test_a_base_model_from_nothing_is_one_that_every_stage_takes(
    base: Path, tmp_path: Path, shipped_kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = shipped_kernels.apply_multimodal_rotary_pos_emb, shipped_kernels.Qwen3TTSRMSNorm.forward
    monkeypatch.chdir(tmp_path)
    pretrain.main(["talker", "--output", str(base), "--steps", "4", "--batch-frames", "200", *SMALL])
    current.end()
    (run,) = (tmp_path / "runs").iterdir()
    (tmp_path / "more").mkdir()
    monkeypatch.chdir(tmp_path / "more")
    more = ["--output", str(base), "--steps", "1", "--batch-frames", "200", "--learning-rate", "0", *SMALL]
    pretrain.main(["talker", "--begin-with", str(run), *more])
    current.end()
    (other,) = (tmp_path / "more" / "runs").iterdir()
    first, second = (load_file(folder / "artifacts" / pretrain.WEIGHTS) for folder in (run, other))
    assert first.keys() == second.keys() and all((first[name] == second[name]).all() for name in first)
    pretrain.main(["save", "--output", str(base), "--run", str(run), *SMALL])
    # Users' generation has no replaced kernels.
    shipped_kernels.apply_multimodal_rotary_pos_emb, shipped_kernels.Qwen3TTSRMSNorm.forward = shipped
    # The vocoder's weights are a large package of their own: here frames only need to become as much audio.
    monkeypatch.setattr(mel_codec, "load_vocoder", lambda: torch.nn.Upsample(scale_factor=256))
    model = load_voice_model(str(base), "cpu")
    assert model.generate_defaults == pretrain.GENERATION
    reference = np.random.default_rng(0).normal(0, 0.1, 48_000).astype(np.float32)
    prompt = model.create_voice_clone_prompt((reference, 24_000), None, x_vector_only_mode=True)
    wavs, rate = model.generate_voice_clone(["Hello."], ["auto"], voice_clone_prompt=prompt, max_new_tokens=6)
    assert rate == 22_050 and 0 < len(wavs[0]) <= 6 * 1792 and np.isfinite(wavs[0]).all()


# ---- a voice that it has not heard


def test_the_last_texts_of_a_voice_are_held_out(tmp_path: Path) -> None:
    (tmp_path / "speech" / "lj").mkdir(parents=True)
    lines = ["id|text|speaker", 'an4/1|"YES|an4-1']
    for number in range(25):
        (tmp_path / "speech" / "lj" / f"{number:02d}.flac").write_bytes(bytes([number]))
        lines.append(f'lj/{number:02d}|Text {number}, as "said".|lj')
    (tmp_path / "speech" / "metadata.csv").write_text("\n".join(lines) + "\n")
    target.main(["lj", "--speech", str(tmp_path / "speech"), "--output", str(tmp_path / "lj")])
    with (tmp_path / "lj" / "transcripts.csv").open(newline="") as file:
        trained = list(csv.DictReader(file))
    held_out = read_rows(tmp_path / "lj" / "held_out.jsonl")
    assert [row["text"] for row in trained] == [f'Text {number}, as "said".' for number in range(5)]
    assert [Path(row["audio"]).read_bytes() for row in held_out] == [bytes([number]) for number in range(5, 25)]
    assert {path.name for path in (tmp_path / "lj" / "recordings").iterdir()} == {row["audio"] for row in trained}


def test_joe_says_each_file_of_sentences(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "texts").mkdir()
    files = {"target": ["A.", "B."], "held_out_everyday": ["C."], "held_out_simple": ["D."]}
    for name, lines in files.items():
        (tmp_path / "texts" / f"{name}.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(target, "say_joe", lambda texts, folder: [(folder / f"{text[0]}.wav", text) for text in texts])
    target.main(["joe", "--texts", str(tmp_path / "texts"), "--output", str(tmp_path / "joe")])
    assert (tmp_path / "joe" / "transcripts.csv").read_text().split() == ["audio,text", "A.wav,A.", "B.wav,B."]
    for name in ("held_out_everyday", "held_out_simple"):
        (row,) = read_rows(tmp_path / "joe" / f"{name}.jsonl")
        assert row["text"] == files[name][0] and row["audio"].endswith(f"{name}/{row['text'][0]}.wav")


@pytest.fixture
def voice(base: Path, tmp_path: Path) -> Path:
    """An exported voice, anna, of a model not yet trained, with larger weights, so that it says many codes."""
    torch.manual_seed(0)
    whole, tokenizer = pretrain.build(pretrain.parse(["talker", "--output", str(base), *SMALL]))
    with torch.no_grad():
        for parameter in whole.talker.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    talker = whole.config.talker_config
    talker.spk_id, talker.spk_is_dialect = speaker_ids(["anna"], whole.config), {"anna": False}
    tokenizer.save_pretrained(tmp_path / "voice")
    save_model(whole, tmp_path / "voice")
    shutil.copytree(base / "speech_tokenizer", tmp_path / "voice" / "speech_tokenizer")
    return tmp_path / "voice"


def test_codes_are_chosen_as_the_voice_chooses_them(voice: Path) -> None:
    whole = load_voice_model(str(voice))
    codes = generate_greedily(whole, "auto", streaming=False, max_new_tokens=20)
    assert len(np.unique(codes)) > 8
    asked = codes.copy()
    asked[-1, 1:] = (asked[-1, 1:] + 1) % 32  # what a frame's own other codes are makes no difference
    short = {"text": "Well.", "speaker": "anna", "audio_codes": codes[:7]}
    chosen, _ = fit_decoder.chosen_codes(whole, [{"text": TEXT, "speaker": "anna", "audio_codes": asked}, short])
    assert (chosen.numpy() == codes).all()


def test_a_decoder_is_fitted_to_a_voice_and_its_codes_stay(voice: Path, tmp_path: Path, capsys: Any) -> None:
    codec = load_codec(str(voice))
    drawn, rows = np.random.default_rng(0), []
    for number in range(12):
        wav = (np.sin(np.arange(40_000) * (0.05 + 0.01 * number)) + drawn.normal(0, 0.1, 40_000)).astype(np.float32)
        write_wav(tmp_path / f"{number}.wav", 0.3 * wav)
        (codes,) = codec.encode([load_audio(tmp_path / f"{number}.wav", codec.sample_rate_hz)])
        text = f"{TEXT} {'Well. ' * number}"
        rows.append(
            {"audio": str(tmp_path / f"{number}.wav"), "text": text, "speaker": "anna", "audio_codes": codes.tolist()}
        )
    write_rows(tmp_path / "codes.jsonl", rows)
    fit_decoder.main(["--voice", str(voice), "--codes", str(tmp_path / "codes.jsonl"), "--steps", "200"])
    before, after = map(float, re.findall(r"aside ([\d.]+) of a deviation, now ([\d.]+)", capsys.readouterr().out)[0])
    assert after < 0.7 * before
    fitted = load_codec(str(voice))
    wav = load_audio(tmp_path / "0.wav", codec.sample_rate_hz)
    assert (fitted.encode([wav])[0] == codec.encode([wav])[0]).all()
    write_rows(tmp_path / "one.jsonl", rows[:1])
    with pytest.raises(SystemExit, match="has one text; one is learnt from and another kept aside"):
        fit_decoder.main(["--voice", str(voice), "--codes", str(tmp_path / "one.jsonl")])
    write_rows(tmp_path / "short.jsonl", [row | {"audio_codes": row["audio_codes"][:9]} for row in rows[:3]])
    with pytest.raises(SystemExit, match="has 18 frames to learn from; more than 32 are needed"):
        fit_decoder.main(["--voice", str(voice), "--codes", str(tmp_path / "short.jsonl")])
    with pytest.raises(SystemExit, match=r"codes\.jsonl is not there"):
        fit_decoder.main(["--voice", str(voice), "--codes", str(tmp_path / "no" / "codes.jsonl")])


def test_a_script_is_run_with_the_codec_known(base: Path, tmp_path: Path) -> None:
    script = RECIPE / "demonstration" / "with_mel_codec.py"

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, check=False)

    wrong = run("trian.py")
    assert wrong.returncode == 1 and "takes a script of the recipe" in wrong.stderr and "train.py" in wrong.stderr
    wav = np.random.default_rng(0).normal(0, 0.1, 30_000).astype(np.float32)
    write_wav(tmp_path / "a.wav", wav)
    row = {"audio": str(tmp_path / "a.wav"), "text": "A.", "speaker": "a", "ref_audio": str(tmp_path / "a.wav")}
    write_rows(tmp_path / "segments.jsonl", [row])
    codec = base / "speech_tokenizer"
    given = ("--segments", str(tmp_path / "segments.jsonl"), "--output-dir", str(tmp_path), "--model-path", str(codec))
    done = run("prepare.py", *given, "--num-workers", "0")
    assert done.returncode == 0, done.stderr
    (coded,) = read_rows(tmp_path / "codes.jsonl", needed=("audio_codes",))
    assert np.shape(coded["audio_codes"]) == (-(-30_000 * 22_050 // 24_000 // 1792), 6)
