"""A page on this machine alone: record a voice, let it say something, and compare it with a voice that was trained.

python demo.py --voice voice/voice-anna
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Read when they are imported: nothing of what is typed or said here is to be reported anywhere.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import numpy as np
import torch
from audio import SAMPLE_RATE_HZ, Wav, load_audio, write_wav
from qwen import (
    BASE_MODELS,
    check_language,
    chosen_device,
    load_voice_model,
    local_folder,
    trained_language,
    wants_whole_text,
)
from scores import SCORER_RATE_HZ, SpeakerEncoder, Unavailable, Unscorable
from texts import check_text, strange_letters
from voice_folder import made_from
from zero_shot_clone import Cloned, clone, load_base, load_reference, most_tokens, provenance_of, was_cut_short

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from qwen_tts import Qwen3TTSModel

try:
    import gradio as gr
except ImportError as error:
    raise SystemExit("the demo needs gradio, which is not installed: pip install 'keepstep[voice]'") from error

HOST = "127.0.0.1"
RANGE_DB = 80.0
"""From the loudest of a picture to its black."""
CSS = "footer {display: none !important}"


@dataclass
class Studio:
    """What stands behind the button, without the page."""

    folder: Path
    """Where what was said lies."""
    base: Qwen3TTSModel
    base_name: str
    voice: Qwen3TTSModel | None = None
    voice_name: str = ""
    encoder: SpeakerEncoder | None = None
    num_said: int = 0

    def say(
        self,
        reference: str | None,
        ref_text: str,
        text: str,
        language: str,
        speaker: str | None,
        seed: float | None,
        agreed: bool,
    ) -> tuple[Path, Path | None, str]:
        """Files of the clone and of the trained voice, and what was measured of them; ValueError in words for users."""
        if not agreed:
            raise ValueError("tick that the speaker agreed: a voice may be cloned only with its speaker's consent")
        if not reference:
            raise ValueError("record a voice or upload one first, 3 to 15 s of one speaker")
        wav = load_reference(reference, how_to_trim="with the scissors below the recording, to at most")
        number = int(seed or 0)
        cloned = clone(self.base, text, wav, ref_text or None, language, number)
        self.num_said += 1
        path = self._write("clone", cloned, self.base_name, number)
        trained = self._say_trained(text, language, speaker, number) if self.voice is not None else None
        trained_path = self._write("trained", trained, self.voice_name, number) if trained else None
        return path, trained_path, self._table(wav, cloned, trained, strange_letters([text]))

    def _say_trained(self, text: str, language: str, speaker: str | None, seed: int) -> Cloned:
        assert self.voice is not None
        speaker = speaker or speakers_of(self.voice)[0]
        language = check_language(self.voice, language)
        if language == "auto":
            language = trained_language(self.voice) or language
        most = most_tokens(self.voice)
        torch.manual_seed(seed)
        began = time.perf_counter()
        wavs, sample_rate_hz = self.voice.generate_custom_voice(
            check_text(text), speaker, language, non_streaming_mode=wants_whole_text(self.voice), max_new_tokens=most
        )
        took_s = time.perf_counter() - began
        cut_short = was_cut_short(self.voice, wavs[0], most)
        return Cloned(np.asarray(wavs[0], np.float32), sample_rate_hz, took_s, f"trained voice {speaker}", cut_short)

    def _write(self, kind: str, said: Cloned, model: str, seed: int) -> Path:
        path = self.folder / f"{kind}-{self.num_said:03}.wav"
        write_wav(path, said.wav, said.sample_rate_hz, provenance_of(model, said.method, str(seed)))
        return path

    def _table(self, reference: Wav, cloned: Cloned, trained: Cloned | None, warning: str) -> str:
        lines = ["| | length | real-time factor | similarity to the reference |", "|---|---|---|---|"]
        notes = [f"\n{warning}."] if warning else []
        for said in (cloned, trained):
            if said is not None:
                alike = self._similarity(reference, said)
                lines.append(f"| {said.method} | {said.duration_s:.1f} s | {said.real_time_factor:.2f} | {alike} |")
                if said.cut_short:
                    notes.append(f"\n{said.method}: stopped before its end, the text may be cut short.")
        return "\n".join([*lines, *notes])

    def _similarity(self, reference: Wav, said: Cloned) -> str:
        if self.encoder is None:
            return "not measured: pip install resemblyzer"
        try:
            first, second = (self.encoder.embed(_at_scorer_rate(wav)) for wav in (reference, said.wav))
        except Unscorable as error:
            return f"not measured: {error}"
        return f"{float(first @ second):.2f}"


def _at_scorer_rate(wav: Wav) -> Wav:
    import soxr

    return np.asarray(soxr.resample(wav, SAMPLE_RATE_HZ, SCORER_RATE_HZ), np.float32)


def speakers_of(voice: Qwen3TTSModel) -> list[str]:
    return sorted(voice.get_supported_speakers() or [])


def spectrogram(wav: Wav, longest_s: float) -> Figure:
    """0 to 12 kHz in decibels; `longest_s` long, so that pictures side by side have one scale."""
    from matplotlib.figure import Figure

    size, hop = 1024, 256
    framed = np.lib.stride_tricks.sliding_window_view(np.pad(wav, size // 2), size)[::hop] * np.hanning(size)
    power_db = 20 * np.log10(np.abs(np.fft.rfft(framed)) + 1e-6).T
    loudest_db = max(0.0, float(power_db.max()))  # so that silence is black
    figure = Figure(figsize=(5, 2), layout="constrained")
    axes = figure.subplots()
    extent = (0, len(wav) / SAMPLE_RATE_HZ, 0, SAMPLE_RATE_HZ / 2_000)
    axes.imshow(
        power_db,
        origin="lower",
        aspect="auto",
        extent=extent,
        cmap="magma",
        vmin=loudest_db - RANGE_DB,
        vmax=loudest_db,
    )
    axes.set(xlim=(0, longest_s), xlabel="seconds", ylabel="kHz")
    return figure


def build_page(studio: Studio) -> gr.Blocks:
    languages = [language.title() for language in studio.base.get_supported_languages() or ["auto"]]
    speakers = speakers_of(studio.voice) if studio.voice is not None else []
    with gr.Blocks(title="Clone a voice", analytics_enabled=False) as page:
        gr.Markdown("# Clone a voice\nA few seconds of speech, a text, and the model says it. All of it stays here.")
        with gr.Row(equal_height=False):
            with gr.Column():
                reference = gr.Audio(
                    sources=["microphone", "upload"],
                    type="filepath",
                    label="Reference: 3 to 15 s of one voice",
                    buttons=["download"],  # there is one to share, with others on the internet
                )
                ref_text = gr.Textbox(label="What the reference says (optional: more like it, if it is exact)")
            with gr.Column():
                text = gr.Textbox(label="Text to say", lines=3)
                with gr.Row():
                    language = gr.Dropdown(languages, value=languages[0], label="Language")
                    seed = gr.Number(0, precision=0, label="Seed")
                    speaker = gr.Dropdown(
                        speakers, value=next(iter(speakers), None), label="Trained voice", visible=len(speakers) > 1
                    )
                agreed = gr.Checkbox(False, label="The speaker agreed that their voice is cloned")
                button = gr.Button("Clone", variant="primary")
        figures = gr.Markdown()
        with gr.Row(equal_height=False):
            with gr.Column():
                cloned = gr.Audio(label="Clone", interactive=False, type="filepath", buttons=["download"])
                cloned_picture = gr.Plot(show_label=False)
            with gr.Column(visible=studio.voice is not None):
                trained = gr.Audio(label="Trained voice", interactive=False, type="filepath", buttons=["download"])
                trained_picture = gr.Plot(show_label=False)
            with gr.Column():
                reference_again = gr.Audio(label="Reference", interactive=False, type="filepath", buttons=["download"])
                reference_picture = gr.Plot(show_label=False)

        def answer(*asked: Any) -> tuple[Any, ...]:
            try:
                path, trained_path, table = studio.say(*asked)
            except ValueError as error:
                raise gr.Error(str(error), duration=None, print_exception=False, title="Not cloned") from error
            wavs = [load_audio(each) if each else None for each in (path, trained_path, asked[0])]
            longest_s = max(len(wav) for wav in wavs if wav is not None) / SAMPLE_RATE_HZ
            pictures = [None if wav is None else spectrogram(wav, longest_s) for wav in wavs]
            paths = [str(each) if each else None for each in (path, trained_path, asked[0])]
            return table, *paths, *pictures

        shown = [figures, cloned, trained, reference_again, cloned_picture, trained_picture, reference_picture]
        asked = [reference, ref_text, text, language, speaker, seed, agreed]
        button.click(answer, asked, shown, api_name="clone", concurrency_limit=1, show_progress_on=figures)
    return page


def require_free(port: int) -> None:
    def is_free(candidate: int) -> bool:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            return probe.connect_ex((HOST, candidate)) != 0

    if not 1 <= port <= 65535:
        raise ValueError(f"--port {port}: a number from 1 to 65535 is needed")
    if not is_free(port):
        other = next((candidate for candidate in range(port + 1, min(port + 100, 65536)) if is_free(candidate)), None)
        raise ValueError(f"port {port} is taken by another program: stop it, or give --port {other or 'another'}")


def load_studio(model: str | None, voice: str | None, device: str, folder: Path) -> Studio:
    device = chosen_device(device)
    model = model or (made_from(local_folder(voice)) if voice else None) or BASE_MODELS[0]
    base = load_base(model, device)
    trained = load_voice_model(voice, device) if voice else None
    if trained is not None and trained.model.tts_model_type != "custom_voice":
        raise ValueError(
            f"--voice {voice} is a {trained.model.tts_model_type} model: name the folder that export.py wrote"
        )
    try:
        encoder: SpeakerEncoder | None = SpeakerEncoder(device)
    except Unavailable as error:
        print(f"no similarity: {error}")
        encoder = None
    return Studio(folder, base, model, trained, voice or "", encoder)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", help=f"folder or hub id of a base model (default: what --voice was made from, or {BASE_MODELS[0]})"
    )
    parser.add_argument("--voice", help="folder of a trained voice to compare with, as export.py wrote it")
    parser.add_argument(
        "--port", type=int, default=7860, help=f"on {HOST}, where nobody else sees it (default: %(default)s)"
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="(default: %(default)s)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    warnings.filterwarnings("ignore", module="gradio")  # of names that change in the packages it uses
    with tempfile.TemporaryDirectory(prefix="voices-") as folder:
        os.environ["GRADIO_TEMP_DIR"] = folder  # recordings, and what was made of them, go with the page
        try:
            require_free(args.port)
            studio = load_studio(args.model, args.voice, args.device, Path(folder))
        except ValueError as error:
            sys.exit(str(error))
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the recordings go then, too
        print(f"open http://{HOST}:{args.port} (Ctrl-C ends it)", flush=True)
        build_page(studio).launch(
            server_name=HOST, server_port=args.port, share=False, ssr_mode=False, quiet=True, css=CSS, footer_links=[]
        )


if __name__ == "__main__":
    main()
