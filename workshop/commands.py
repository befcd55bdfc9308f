"""Runs every command that the lessons document and writes what it printed: results/commands.md.

    python workshop/commands.py                  # some 10 minutes on 2 cores
    python workshop/commands.py --only 01 02     # some of the lessons
    python workshop/commands.py --only 04 --output workshop/results/voice_commands.md    # in an environment of its own

Each is run as it stands there, in its lesson's folder. Where a machine cannot do what is asked, as eight workers on
two cores, what is said instead is shown. Lines that Ray logs of itself are left out.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

WORKSHOP = Path(__file__).resolve().parent
COMMANDS = {
    "01-ddp-pytorch-only": (
        "python train_single_machine.py",
        "python train_ddp.py --world-size 2 --epochs 3",
        "torchrun --nproc_per_node=2 train_ddp.py --epochs 3",
        "torchrun --nproc_per_node=4 train_ddp.py --epochs 3",
        "./launch_multinode_ddp.sh --local -- --epochs 3",
        "keepstep run --workers 2 train_keepstep.py --epochs 3 --order torch",
    ),
    "02-ddp-pytorch-ray": (
        "python train_ray_ddp.py --num-workers 2 --epochs 3 --use-gpu False",
        "python train_ray_ddp.py --num-workers 1 --epochs 1 --task resnet",
        "python train_ray_ddp.py --num-workers 8 --epochs 3",
        "python train_ray_ddp.py --num-workers 2 --use-gpu True",
        "python train_ray_ddp_with_ray_data.py --num-workers 2 --epochs 3",
        "keepstep run --engine ray --workers 2 train_keepstep.py --epochs 3 --order torch",
        "keepstep run --engine ray --workers 2 --cpus-per-worker 0.5 train_keepstep_with_ray_data.py --epochs 3",
    ),
    "03-fsdp-pytorch-ray-deepspeed": (
        "python train_ray_fsdp.py --num-workers 2 --batch-size 256 --epochs 3",
        "python train_ray_fsdp2.py --cpu-offload --mixed-precision --no-reshard --checkpoint-freq 5 "
        "--profile-dir traces",
        "python train_ray_deepspeed.py --zero-stage 3 --epochs 1",
        "keepstep run --workers 2 --strategy fsdp2 train_keepstep.py --epochs 3 --order torch",
    ),
    "04-qwen3-tts-ft-ray": (
        "keepstep new qwen3_tts recipe",
        "python recipe/tiny.py --output tiny-base",
        "python scripts/run_pipeline.py --all --input-dir $KEEPSTEP_DATA/speech/lj --transcripts "
        "$KEEPSTEP_DATA/speech/metadata.csv --model-path tiny-base --speaker-name lj --num-workers 2 --num-epochs 2 "
        "--learning-rate 1e-3 --i-have-consent",
        "python scripts/zero_shot_clone.py --ref-audio $KEEPSTEP_DATA/speech/lj/LJ001-0002.flac --model tiny-base "
        "--text 'Hello, this is my cloned voice.' --output output.wav --i-have-consent",
        "python scripts/zero_shot_clone.py --ref-audio $KEEPSTEP_DATA/speech/lj/LJ001-0002.flac --model tiny-base "
        "--text 'Hello.' --output output.wav",
    ),
    "05-fault-tolerance": (
        "python train_ray_fault_tolerant.py --num-workers 2 --epochs 3 --use-gpu False --name mine",
        "keepstep run --workers 2 --checkpoint-every 5 --name mine train_keepstep.py --epochs 3 --use-gpu False",
        "python kill_and_count.py raw --kills 1 --seed 9 --epochs 2",
        "python kill_and_count.py keepstep --kills 1 --seed 9 --epochs 2",
    ),
    "06-ray-data": (
        "python images_to_parquet.py",
        "python train_ray_data.py --num-workers 2 --epochs 2 --use-gpu False",
        "keepstep run --workers 2 --checkpoint-every 5 --name mine train_keepstep.py --epochs 2 --use-gpu False",
        "python count_rows.py keepstep --kills 1 --seed 9 --then-workers 1",
    ),
    "10-tune": (
        "python tune_ray.py --method grid --lrs 1e-3,1e-2 --epochs 2",
        "keepstep tune --name grid --method grid --metric accuracy:max --space 'lr=grid(1e-3,1e-2)' train_keepstep.py "
        "--epochs 2 --order torch",
    ),
    "11-inference": (
        "python train.py --epochs 4 --lr 1e-2",
        "keepstep export digits --storage output/runs --output output/model.safetensors",
        "python make_images.py",
        "python predict_direct.py",
        "python predict_batch.py --num-workers 2",
        "python predict_actor.py --num-workers 2",
        "keepstep predict digits --storage output/runs --data output/images --output output/predictions/keepstep "
        "--with predict.py --workers 2",
    ),
}
_OF_RAY_ITSELF = re.compile(
    r"^\d{4}-\d\d-\d\d |^\[\d{4}-|^\(.*(Controller|SplitCoordinator|PlacementGroup|autoscaler)|Checkpoint successfully|"
    r"Reporting training result|Warning|warn|^\s*$|it/s\]|row/s\]|Setting up process group|"
    r"- \(node_id|Started training worker|Starting execution of Dataset|Execution plan of Dataset|Progress bars|"
    r"Dataset \w+ execution finished|^\(raylet\)| row\]$|To visualize your results|"
    # and the same of torch's profiler and of DeepSpeed
    r"^USDT:|^ERROR: External init callback|CPUAllocator.cpp|^DeepSpeed .* built successfully"
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    lessons = [lesson[:2] for lesson in COMMANDS if lesson[:2] != "04"]  # whose packages others do not get on with
    parser.add_argument("--only", nargs="+", default=lessons, metavar="LESSON")
    parser.add_argument("--output", type=Path, default=WORKSHOP / "results" / "commands.md")
    args = parser.parse_args()
    page = ["# Every documented command, and what it printed\n", f"Lessons {', '.join(args.only)}: {machine()}.\n"]
    for lesson, commands in COMMANDS.items():
        if lesson[:2] not in args.only:
            continue
        page.append(f"## {lesson}\n")
        with tempfile.TemporaryDirectory(prefix="workshop-") as folder:
            place = copy(lesson, Path(folder))
            page += [shown(command, place) for command in commands]
    args.output.write_text("\n".join(page))
    print(f"written: {args.output}")


def machine() -> str:
    gpus = f"{torch.cuda.device_count()} GPUs" if torch.cuda.is_available() else "no GPU"
    return f"{os.cpu_count()} cores, {gpus}, torch {torch.__version__}"


def copy(lesson: str, folder: Path) -> Path:
    """The lesson's files in a folder that goes with what they write."""
    for name in ("common", lesson):
        shutil.copytree(WORKSHOP / name, folder / name, ignore=shutil.ignore_patterns("output", "runs", "*.ipynb"))
    return folder / lesson


def shown(command: str, place: Path) -> str:
    words = shlex.split(os.path.expandvars(command))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0", "COLUMNS": "130"}
    began = time.perf_counter()
    done = subprocess.run(
        words, cwd=place, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    took = time.perf_counter() - began
    print(f"{took:6.1f} s  exit {done.returncode}  {command}", flush=True)
    text = _COLOUR.sub("", done.stdout).replace(f"{place}/", "").replace(str(place.parent), "…")
    text = text.replace(f"{WORKSHOP.parent}/", "").replace(os.environ.get("KEEPSTEP_DATA", "\0"), "$KEEPSTEP_DATA")
    lines = [line.rstrip() for line in text.splitlines() if not _OF_RAY_ITSELF.search(line)]
    lines = [re.sub(r"^\(\w+ pid=[^)]*\) ", "", line) for line in lines]
    ended = "" if done.returncode == 0 else f"(exit code {done.returncode})\n"
    return "```\n$ {}\n{}\n{}```\n".format(command, "\n".join(lines[-100:]), ended)


if __name__ == "__main__":
    main()
