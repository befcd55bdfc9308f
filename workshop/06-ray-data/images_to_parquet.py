"""Writes MNIST or CIFAR-10 as Parquet files of PNGs, as data sets of images are often stored.

python images_to_parquet.py --task resnet --limit 2048
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the lessons share models and data
from common import parquet
from common.arguments import CPU_LIMIT
from common.tasks import TASKS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="resnet", help="resnet: MNIST; vit: CIFAR-10")
    parser.add_argument("--limit", type=int, default=CPU_LIMIT, help="the first LIMIT images; 0: all")
    parser.add_argument("--rows-per-file", type=int, default=128)
    parser.add_argument("--data", help="folder of the data; otherwise $KEEPSTEP_DATA, the cache or a download")
    parser.add_argument("--output", type=Path, default=Path("output"))
    args = parser.parse_args()
    if args.limit < 0 or args.rows_per_file < 1:
        parser.error(f"--limit {args.limit} --rows-per-file {args.rows_per_file}: 0 and 1 are the least")
    train_set, _ = TASKS[args.task].datasets(args.data, args.limit or None)
    folder = args.output / "images" / args.task
    files = parquet.write(train_set, folder, args.rows_per_file)
    size = sum(path.stat().st_size for path in files)
    print(f"{len(train_set):,} images in {len(files)} files of {folder}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
