"""Runs the voice project's stages one after another, each command shown; ends with the first that fails.

python scripts/run_pipeline.py --all --input-dir recordings --speaker-name anna --asr-model small --i-have-consent
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from stages import STAGES, StageFailed, add_flags, run, voice_folder


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every stage")
    for name, stage in STAGES.items():
        parser.add_argument(f"--{name}", action="store_true", help=(stage.__doc__ or "").rstrip(".").lower())
    add_flags(parser)
    args = parser.parse_args(argv)
    stages = [name for name in STAGES if args.all or getattr(args, name)]
    if not stages:
        parser.error(f"which stages? give --all, or some of {', '.join(f'--{name}' for name in STAGES)}")
    print(f"stages: {', '.join(stages)}", flush=True)
    try:
        run(stages, args)
    except StageFailed as error:
        sys.exit(str(error))
    print(f"\ndone: {', '.join(stages)}")
    if "train" in stages:
        print(f"the voice: {voice_folder(args)}")
    if "infer" in stages:
        print(f"listen and compare: {args.output_dir / 'evaluation' / 'index.html'}")


if __name__ == "__main__":
    main()
