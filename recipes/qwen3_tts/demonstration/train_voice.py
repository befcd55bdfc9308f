"""The recipe's train.py for a base model of pretrain.py: the same, once its codec is known."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
import mel_codec  # noqa: E402, F401
from train import main  # noqa: E402

if __name__ == "__main__":
    main()
