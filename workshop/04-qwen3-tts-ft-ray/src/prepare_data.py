"""Turns the segments into the codec's codes: codes.jsonl."""

from __future__ import annotations

from stages import main

if __name__ == "__main__":
    main("prepare", __doc__)
