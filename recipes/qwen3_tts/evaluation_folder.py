"""What lies in the folder of an evaluation and who speaks there, for all that write it or read it."""

from __future__ import annotations

SPEECH = "generated.jsonl"
"""infer.py's row a text: {id, text, language, base, fine_tuned, real, source, seconds, frames, cut, keys}."""
SETTINGS = "infer.json"
RESULTS = "comparison_results.json"
PAGE = "index.html"

SYNTHETIC = ("base", "fine_tuned")
SYSTEMS = (*SYNTHETIC, "real")
"""Who speaks. Each has a folder of this name with a WAV file a text, and a field with its path in a row."""
