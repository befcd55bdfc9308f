"""Fine-tunes the model on any number of workers, and writes the voice so that it can be loaded."""

from __future__ import annotations

from stages import main

if __name__ == "__main__":
    main("train", __doc__)
