"""The `keepstep` command: parses and calls, decides nothing."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from keepstep.config import SETTINGS, flag
from keepstep.errors import EXIT_FAILED, EXIT_STOPPED, EXIT_USAGE, KeepstepError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    words, rest = _split_at_script(words) if words[:1] == ["run"] else (words, [])
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
    place = 1
    while place < len(words) and words[place].startswith("-"):
        place += 2 if words[place] in values else 1
    return words[: place + 1], words[place + 1 :]


def _run(arguments: argparse.Namespace) -> int:
    from keepstep.engines import Outcome
    from keepstep.job import Target
    from keepstep.supervisor import supervise

    settings = {name: getattr(arguments, name) for name in SETTINGS if getattr(arguments, name, None) is not None}
    result = supervise(settings, Target(arguments.target, tuple(arguments.arguments)))
    if result.failures and result.failures[0].user_error:
        return EXIT_USAGE
    return {Outcome.FINISHED: 0, Outcome.STOPPED: EXIT_STOPPED, Outcome.FAILED: EXIT_FAILED}[result.outcome]


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


def _parser() -> argparse.ArgumentParser:
    about = "Runs PyTorch training loops on one or many workers, and loses nothing when one dies."
    parser = argparse.ArgumentParser(prog="keepstep", description=about, allow_abbrev=False)
    from keepstep import __version__

    parser.add_argument("--version", action="version", version=f"keepstep {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands)
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
    _add_export(commands)
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
