"""What `keepstep predict` needs to know: the model, and what to do with a batch.

    keepstep predict digits --storage output/runs --data output/images --output output/predictions/keepstep \\
        --with predict.py --workers 2
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the lessons share models and data

from torch import nn

from common import classifier

FOLDER = Path(__file__).resolve().parent / "output"


def make_model() -> nn.Module:
    return classifier.make_model(FOLDER)[1]


def predict(model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    task = classifier.make_model(FOLDER)[0]
    return classifier.classify(task, model, classifier.decode(batch["image"]))
