"""A script of the recipe, on a base model of pretrain.py: the same, once its codec is known.

python with_mel_codec.py prepare.py --segments lj/segments.jsonl --output-dir lj --model-path base --num-workers 0
keepstep run with_mel_codec.py train.py --codes lj/codes.jsonl --model-path base --streaming --i-have-consent
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

RECIPE = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(RECIPE / "demonstration"), str(RECIPE)]
import mel_codec  # noqa: E402, F401


def main() -> None:
    scripts = sorted(path.name for path in RECIPE.glob("*.py"))
    if len(sys.argv) < 2 or sys.argv[1] not in scripts:
        sys.exit(f"{Path(__file__).name} takes a script of the recipe and what that one takes: {', '.join(scripts)}")
    sys.argv = [str(RECIPE / sys.argv[1]), *sys.argv[2:]]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
