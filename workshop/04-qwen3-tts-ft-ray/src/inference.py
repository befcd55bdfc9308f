"""Lets the base model and the trained voice say the same texts, and scores both: one page, comparison_results.json."""

from __future__ import annotations

from stages import main

if __name__ == "__main__":
    main("infer", __doc__)
