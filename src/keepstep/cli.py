"""The `keepstep` command: parses and calls, decides nothing."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from keepstep.config import DEVICES, SETTINGS, flag
from keepstep.errors import EXIT_USAGE, ConfigError, KeepstepError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    words, rest = _split_at_script(words) if words[:1] in (["run"], ["tune"], ["verify"]) else (words, [])
    arguments = _parser().parse_args(words)
    arguments.arguments = rest
    try:
        code: int = arguments.call(arguments)
        return code
    except KeepstepError as error:
        print(f"keepstep: {error.title}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print("keepstep: stopped at once; what was saved is kept", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `keepstep runs | head`
        sys.stderr.close()
        return 0


def _split_at_script(words: list[str]) -> tuple[list[str], list[str]]:
    """(keepstep's words, script included; the script's own), as torchrun does it: argparse would drop a `--`."""
    values = {flag(name) for name, setting in SETTINGS.items() if not isinstance(setting.default, bool)}
    if words[0] == "tune":
        values |= {"--space", "--metric", "--trials", "--method", "--grace"}
    if words[0] == "verify":
        values |= {"--kills", "--faults-seed", "--output"}
    place = 1
    while place < len(words) and words[place].startswith("-"):
        place += 2 if words[place] in values else 1
    return words[: place + 1], words[place + 1 :]


def _run(arguments: argparse.Namespace) -> int:
    from keepstep.job import Target
    from keepstep.supervisor import supervise

    target = Target(arguments.target, tuple(arguments.arguments))
    return supervise(_settings(arguments), target, began=_process_began()).exit_code


def _process_began() -> float:
    """When the user began to wait: starting Python is part of it, too. psutil knows it to the second only."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except OSError:  # not Linux
        return time.time()


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Those that were given."""
    return {name: getattr(arguments, name) for name in SETTINGS if getattr(arguments, name, None) is not None}


def _tune(arguments: argparse.Namespace) -> int:
    from keepstep.job import Target
    from keepstep.tune.command import tune
    from keepstep.tune.search import Options

    if importlib.util.find_spec("ray") is None:
        raise ConfigError("keepstep tune searches with Ray Tune, which is not installed: pip install 'keepstep[ray]'")
    options = Options(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Options)})
    return tune(_settings(arguments), Target(arguments.target, tuple(arguments.arguments)), options)


def _verify(arguments: argparse.Namespace) -> int:
    from keepstep.job import Target
    from keepstep.verify.command import verify
    from keepstep.verify.verification import Options

    options = Options(arguments.kills, arguments.faults_seed, arguments.output)
    return verify(_settings(arguments), Target(arguments.target, tuple(arguments.arguments)), options)


def _runs(arguments: argparse.Namespace) -> int:
    from keepstep.show import print_runs

    return print_runs(arguments.storage)


def _show(arguments: argparse.Namespace) -> int:
    from keepstep.show import print_run

    return print_run(arguments.storage, arguments.name)


def _checkpoints(arguments: argparse.Namespace) -> int:
    from keepstep.checkpoints import print_checkpoints

    return print_checkpoints(arguments.storage, arguments.name, arguments.verify)


def _doctor(_: argparse.Namespace) -> int:
    from keepstep.doctor import print_report

    return print_report()


def _demo(arguments: argparse.Namespace) -> int:
    from keepstep.demo import demo

    return demo(Path(arguments.storage))


def _new(arguments: argparse.Namespace) -> int:
    from keepstep.recipes import copy_recipe

    return copy_recipe(arguments.recipe, Path(arguments.folder or arguments.recipe))


def _workshop(arguments: argparse.Namespace) -> int:
    from keepstep.workshop import check_lesson, print_lessons, start_lesson

    if arguments.lesson is None:
        return print_lessons()
    return (check_lesson if arguments.check else start_lesson)(arguments.lesson, Path(arguments.folder))


def _export(arguments: argparse.Namespace) -> int:
    from keepstep.checkpoint.export import choose_step, export, parse_size
    from keepstep.show import existing_run

    store = existing_run(arguments.storage, arguments.name).store_to_read()
    step = choose_step(store, arguments.checkpoint)
    shard_bytes = parse_size(arguments.shard_size) if arguments.shard_size else None
    output = Path(arguments.output or f"{arguments.name}-step{step}{'' if shard_bytes else '.safetensors'}")
    chosen = (arguments.model, arguments.dtype, arguments.strip_prefix, shard_bytes)
    exported = export(store, step, output, *chosen)
    files = f", in {', '.join(exported.files)}" if shard_bytes else ""
    print(f"{output}: {exported.tensors} tensors of step {step}{files}", *exported.notes, sep="\n")
    return 0


def _predict(arguments: argparse.Namespace) -> int:
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise ConfigError(
            "keepstep predict reads and writes Parquet, which needs pyarrow: pip install pyarrow"
        ) from None
    from keepstep.predict import Request
    from keepstep.predict.command import predict

    return predict(Request(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Request)}))


def _parser() -> argparse.ArgumentParser:
    about = "Runs PyTorch training loops on one or many workers, and loses nothing when one dies."
    parser = argparse.ArgumentParser(prog="keepstep", description=about, allow_abbrev=False)
    from keepstep import __version__

    parser.add_argument("--version", action="version", version=f"keepstep {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands)
    _add_tune(commands)
    _add_verify(commands)
    _add(commands, "runs", _runs, "list the runs")
    show = _add(commands, "show", _show, "show one run: settings, metrics, failures, where the time went")
    show.add_argument("name", help="the run's name")
    checkpoints = _add(commands, "checkpoints", _checkpoints, "list a run's checkpoints, and check them")
    checkpoints.add_argument("name", help="the run's name")
    checkpoints.add_argument("--verify", action="store_true", help="read every file; exit code 1 if one is bad")
    _add(commands, "doctor", _doctor, "say what this machine has and lacks", storage=False)
    _add(commands, "demo", _demo, "train, kill a worker, recover, and compare with a run that was not killed")
    new = _add(commands, "new", _new, "start a project from a recipe", storage=False)
    new.add_argument("recipe", help="which one; a wrong name lists them")
    new.add_argument("folder", nargs="?", help="where to put it (default: a folder named like the recipe)")
    workshop = _add(commands, "workshop", _workshop, "learn distributed training by running it", storage=False)
    workshop.add_argument(
        "lesson", nargs="?", type=int, metavar="N", help="which to take out and open; none: list them"
    )
    workshop.add_argument("--check", action="store_true", help="check your answers to the lesson's exercises")
    workshop.add_argument("--folder", default="workshop", help="where your copy is (default: %(default)s)")
    _add_export(commands)
    _add_predict(commands)
    return parser


def _add_export(commands: Any) -> None:
    export = _add(commands, "export", _export, "write a checkpoint's weights as plain safetensors")
    export.add_argument("name", help="the run's name")
    export.add_argument("--checkpoint", default="newest", help="newest, best, or a step (default: %(default)s)")
    export.add_argument("--format", default="safetensors", choices=("safetensors",), help="default: %(default)s")
    export.add_argument("--model", default="model", help="which, where several were prepared (default: %(default)s)")
    export.add_argument(
        "--dtype", choices=("bf16", "fp16", "fp32"), help="cast floating-point tensors (default: as saved)"
    )
    export.add_argument("--strip-prefix", default="", metavar="PREFIX", help="take this off the tensors' names")
    export.add_argument(
        "--shard-size", metavar="SIZE", help="write several files with at most so many bytes of tensors each, as 5GB"
    )
    export.add_argument("--output", help="file, or folder of shards, to write (default: NAME-stepN[.safetensors])")


def _add_predict(commands: Any) -> None:
    predict = _add(commands, "predict", _predict, "predict Parquet files with a checkpoint; the same again goes on")
    predict.add_argument("name", help="the run's name")
    predict.add_argument(
        "--data", required=True, help="Parquet file, folder of them, or address, as s3://bucket/images"
    )
    predict.add_argument("--output", required=True, help="folder, or address, for the Parquet parts")
    script = "file that defines make_model() and predict(model, batch)"
    predict.add_argument("--with", required=True, dest="script", metavar="SCRIPT", help=script)
    predict.add_argument("--checkpoint", default="newest", help="newest, best, or a step (default: %(default)s)")
    predict.add_argument("--model", default="model", help="which, where several were prepared (default: %(default)s)")
    kept = "input columns to write beside the predictions, as id,label (default: all but bytes, lists and structs)"
    predict.add_argument("--keep", metavar="COLUMNS", help=kept)
    predict.add_argument("--batch-size", type=int, default=256, help="rows a call of predict (default: %(default)s)")
    predict.add_argument("--workers", type=int, default=1, help="several: on Ray (default: %(default)s)")
    predict.add_argument("--address", help="Ray cluster, as HOST:6379 or auto (default: none, or one is started here)")
    predict.add_argument("--device", default="auto", choices=DEVICES, help="auto: cuda where there is a GPU")


def _add(
    commands: Any, name: str, call: Callable[[argparse.Namespace], int], help: str, storage: bool = True
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
    parser.set_defaults(call=call)
    if storage:
        parser.add_argument("--storage", default="runs", help="where the runs are (default: %(default)s)")
    return parser


def _add_run(commands: Any) -> None:
    run = commands.add_parser(
        "run",
        help="run a training script, or resume it",
        description="Runs a training script on one or many workers; the same --name again resumes it.",
        usage="keepstep run [options] SCRIPT [its arguments ...]",
        allow_abbrev=False,
    )
    run.set_defaults(call=_run)
    _add_settings(run)


def _add_tune(commands: Any) -> None:
    tune = commands.add_parser(
        "tune",
        help="search a script's best arguments, with Ray Tune",
        description="Searches a script's best arguments: each trial is a run of its own, NAME-0000, NAME-0001, ...",
        usage="keepstep tune [options] --space NAME=KIND(VALUES) --metric METRIC:max SCRIPT [its arguments ...]",
        allow_abbrev=False,
    )
    tune.set_defaults(call=_tune)
    space = "a parameter: lr=loguniform(1e-5,1e-2), width=choice(64,128); also uniform, randint, quniform, grid"
    tune.add_argument("--space", action="append", default=[], metavar="NAME=KIND(VALUES)", help=f"{space}; repeat it")
    tune.add_argument("--metric", required=True, help="what to search for, as accuracy:max or loss:min")
    tune.add_argument("--trials", type=int, help="how many (default: every combination of grids, else 10)")
    methods = "asha: stops bad trials early; pbt: makes them copies of good ones; random, grid: run all to their end"
    tune.add_argument(
        "--method", default="asha", choices=("asha", "pbt", "random", "grid"), help=f"{methods} (default: %(default)s)"
    )
    grace = "reports of the metric before a trial is judged (default: %(default)s)"
    tune.add_argument("--grace", type=int, default=1, metavar="N", help=grace)
    tune.add_argument("--resume", action="store_true", help="go on with the search of this --name")
    _add_settings(tune)


def _add_verify(commands: Any) -> None:
    verify = commands.add_parser(
        "verify",
        help="kill a script's workers, and prove that it comes out the same",
        description="Runs a script undisturbed and with injected faults, compares every step bit for bit, and writes a "
        "certificate, or names what is lost and why. Exit code 0: certified; 1: not.",
        usage="keepstep verify [options] SCRIPT [its arguments ...]",
        allow_abbrev=False,
    )
    verify.set_defaults(call=_verify)
    verify.add_argument("--kills", type=int, default=3, help="how many, at random steps (default: %(default)s)")
    verify.add_argument("--faults-seed", type=int, metavar="SEED", help="draws the same faults as this seed did before")
    output = "folder for certificate.json and certificate.html (default: verify-NAME-TIME in --storage)"
    verify.add_argument("--output", metavar="FOLDER", help=output)
    _add_settings(verify)


def _add_settings(run: argparse.ArgumentParser) -> None:
    """The flags of a run, and its script."""
    for name, setting in SETTINGS.items():
        default, choices = setting.default, setting.metadata["choices"]
        shown = "" if default in (None, False) else f" (default: {default})"
        text = (setting.metadata["help"] + shown).replace("%", "%%")
        if isinstance(default, bool):
            run.add_argument(flag(name), action="store_true", default=None, help=text)
        else:
            run.add_argument(flag(name), type=_kind(name, default), choices=choices, default=None, help=text)
    script = "a script, or package.module:function; what stands after it is the script's"
    run.add_argument("target", metavar="SCRIPT", help=script)


def _kind(name: str, default: Any) -> Callable[[str], Any]:
    """What a flag's text is turned into."""
    if name == "workers":
        return _number_or_range
    if name == "gpus_per_worker":
        return float
    return type(default) if isinstance(default, (int, float)) else str


def _number_or_range(text: str) -> int | str:
    return int(text) if re.fullmatch(r"-?\d+", text) else text


if __name__ == "__main__":
    sys.exit(main())
