"""Cuts recordings into segments of 1 to 15 s with their texts: segments.jsonl, and a report."""

from __future__ import annotations

from stages import main

if __name__ == "__main__":
    main("process", __doc__)
