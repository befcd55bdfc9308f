"""Compares predictions of the same images, made in different ways: every image once, the same class for each.

    python compare.py output/predictions/direct output/predictions/ray_data output/predictions/keepstep

The first is what the others are compared with. Exit code 1: they differ.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pandas as pd

TOLERANCE = 1e-5
"""Of a probability: with other batch sizes the last digits differ."""


def read_predictions(folder: Path) -> pd.DataFrame:
    if not any(folder.glob("*.parquet")):
        sys.exit(f"{folder} holds no predictions: make them first")
    return pd.read_parquet(folder).sort_values("id", ignore_index=True)


def differences(first: pd.DataFrame, second: pd.DataFrame) -> list[str]:
    """What is wrong with the second; nothing, if it says of every image what the first says."""
    if doubled := int(second["id"].duplicated().sum()):
        return [f"{doubled} images are there more than once"]
    if not first["id"].equals(second["id"]):
        missing = len(set(first["id"]) - set(second["id"]))
        return [f"{missing} images are missing, {len(set(second['id']) - set(first['id']))} are too many"]
    found = []
    if others := int((first["predicted"] != second["predicted"]).sum()):
        found.append(f"{others} images have another class")
    if (distance := largest_difference(first, second)) > TOLERANCE:
        found.append(f"probabilities differ by up to {distance:.1e}")
    return found


def largest_difference(first: pd.DataFrame, second: pd.DataFrame) -> float:
    return float((first["probability"] - second["probability"]).abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("predictions", nargs="+", type=Path, help="folders")
    tables = {folder: read_predictions(folder) for folder in parser.parse_args().predictions}
    first = next(iter(tables.values()))
    same = True
    print(f"{'predictions':<12} {'images':>7} {'accuracy':>9}  compared with the first")
    for folder, table in tables.items():
        found = differences(first, table)
        same = same and not found
        accuracy = (table["predicted"] == table["label"]).mean()
        verdict = "; ".join(found) or f"same classes, probabilities within {largest_difference(first, table):.0e}"
        print(f"{folder.name:<12} {len(table):>7,} {accuracy:>9.2%}  {verdict}")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
