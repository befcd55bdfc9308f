"""Settings are checked where they enter; an error says what was found, what was expected and what to do."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.config import (
    SETTINGS,
    CheckpointConfig,
    Config,
    FolderConfig,
    LaunchConfig,
    ObserveConfig,
    StrategyConfig,
    check_run_name,
    flag,
)
from keepstep.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "found", "expected"),
    [
        ({"workers": 0}, "--workers is 0", "at least 1 is needed"),
        ({"workers": -3}, "--workers is -3", "at least 1 is needed"),
        ({"workers": "two"}, "--workers is 'two'", "give a number, as 4, or a range, as 2:8"),
        ({"workers": "8:2", "engine": "ray"}, "--workers is 8:2", "the lower number comes first"),
        ({"workers": "0:2", "engine": "ray"}, "--workers is 0:2", "at least 1 is needed"),
        ({"workers": "2:8"}, "--workers 2:8", "is for --engine ray"),
        ({"address": "auto"}, "--address auto", "is for --engine ray"),
        ({"gpus_per_worker": 2}, "--gpus-per-worker 2", "is for --engine ray"),
        ({"engine": "ray", "nodes": 2, "rendezvous": "a:1"}, "--nodes", "Ray knows its nodes"),
        ({"engine": "ray", "resources": "A100"}, "--resources is 'A100'", "give NAME=AMOUNT"),
        ({"engine": "ray", "cpus_per_worker": -1.0}, "--cpus-per-worker", "must not be negative"),
        ({"max_failures": -1}, "--max-failures is -1", "0 or more is needed"),
        ({"node_rank": 1}, "--node-rank 1 with --nodes 1", "node ranks go from 0 to nodes - 1"),
        ({"nodes": 0}, "--nodes 0", "node ranks go from 0"),
        ({"nodes": 2, "node_rank": -1}, "--node-rank -1 with --nodes 2", "node ranks go from 0"),
        ({"nodes": 2, "workers": 2}, "--nodes 2", "needs --rendezvous HOST:PORT"),
        (
            {"nodes": 2, "workers": 3, "rendezvous": "a:1"},
            "3 workers do not divide over 2 nodes",
            "--workers counts all",
        ),
        ({"engine": "inprocess", "workers": 2}, "1 worker, not 2", "leave --engine out"),
        ({"engine": "slurm"}, "--engine is 'slurm'", "choose one of auto, inprocess, torchrun"),
        ({"strategy": "dp"}, "--strategy is 'dp'", "choose one of auto, single, ddp"),
        ({"precision": "fp8"}, "--precision is 'fp8'", "choose one of fp32, tf32, bf16, fp16"),
        ({"device": "tpu"}, "--device is 'tpu'", "choose one of auto, cpu, cuda"),
        ({"checkpoint_mode": "later"}, "--checkpoint-mode is 'later'", "choose one of async, sync"),
        ({"checkpoint_every": "often"}, "--checkpoint-every is 'often'", "give steps, as 500, or a time"),
        ({"keep": 0}, "--keep is 0", "at least 1 checkpoint must be kept"),
        ({"keep_best": "accuracy"}, "--keep-best is 'accuracy'", "give METRIC:max or METRIC:min"),
        ({"keep_best": ":max"}, "--keep-best is ':max'", "give METRIC:max or METRIC:min"),
        ({"keep_best": "accuracy:up"}, "--keep-best is 'accuracy:up'", "give METRIC:max or METRIC:min"),
        ({"name": "../escape"}, "run name '../escape'", "use letters, digits"),
        ({"wrokers": 2}, "unknown setting wrokers", "known: workers, engine"),
    ],
)
def test_an_error_says_what_was_found_and_what_to_do(settings: dict[str, Any], found: str, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        Config.from_settings(settings)
    assert found in str(error.value)
    assert expected in str(error.value)


@pytest.mark.parametrize(
    "settings",
    [{"workers": 4.0}, {"seed": "x"}, {"name": 5}, {"compile": "false"}],
)
def test_a_value_of_the_wrong_type_is_a_config_error(settings: dict[str, Any]) -> None:
    """From `keepstep.launch(train, workers="4")`: no TypeError from inside, and never a truthy "false"."""
    with pytest.raises(ConfigError, match=flag(next(iter(settings)))):
        Config.from_settings(settings)


def test_a_rendezvous_that_one_node_would_ignore_is_refused() -> None:
    with pytest.raises(ConfigError, match="--rendezvous"):
        Config.from_settings({"rendezvous": "node0:29400"})


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("500", (500, None)),
        ("1", (1, None)),
        (" 20 ", (20, None)),
        ("90s", (None, 90.0)),
        ("90 sec", (None, 90.0)),
        ("10min", (None, 600.0)),
        ("1.5min", (None, 90.0)),
        ("1h", (None, 3600.0)),
        ("0.5h", (None, 1800.0)),
    ],
)
def test_checkpoint_every_is_steps_or_a_time(text: str, interval: tuple[int | None, float | None]) -> None:
    assert CheckpointConfig(checkpoint_every=text).interval() == interval


@pytest.mark.parametrize("text", ["", "0", "0s", "-5", "-5min", "1.5", "5 days", "min", "5m", "1e3", "1h30min", "5MIN"])
def test_checkpoint_every_refuses_what_it_cannot_mean(text: str) -> None:
    with pytest.raises(ConfigError, match="give steps, as 500, or a time, as 90s, 10min or 1h"):
        CheckpointConfig(checkpoint_every=text)


def test_checkpoint_every_takes_a_number_from_python() -> None:
    assert CheckpointConfig(checkpoint_every=250).interval() == (250, None)  # type: ignore[arg-type]


@given(st.integers(1, 10**9))
def test_any_positive_whole_number_is_that_many_steps(steps: int) -> None:
    assert CheckpointConfig(checkpoint_every=str(steps)).interval() == (steps, None)


@given(st.text(max_size=12))
def test_checkpoint_every_either_parses_or_is_a_config_error(text: str) -> None:
    try:
        steps, seconds = CheckpointConfig(checkpoint_every=text).interval()
    except ConfigError:
        return
    assert (steps is None) != (seconds is None)
    assert (steps or seconds or 0) > 0


def test_keep_best_is_a_metric_and_a_direction() -> None:
    assert CheckpointConfig(keep_best="accuracy:max").best() == ("accuracy", True)
    assert CheckpointConfig(keep_best="loss:min").best() == ("loss", False)
    assert CheckpointConfig().best() is None


@pytest.mark.parametrize("name", ["vit", "vit-2", "0", "a.b_c-d", "x" * 128])
def test_plain_run_names_are_taken(name: str) -> None:
    check_run_name(name)
    assert FolderConfig(name=name).name == name


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "a/b", "../x", "/abs", "a b", "-flag", "é", "x" * 129, "a\n"]
)
def test_names_that_could_leave_the_storage_folder_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a plain name"):
        check_run_name(name)


@pytest.mark.parametrize(
    ("settings", "engine"),
    [
        ({}, "inprocess"),
        ({"workers": 2}, "torchrun"),
        ({"engine": "torchrun"}, "torchrun"),
        ({"engine": "inprocess"}, "inprocess"),
    ],
)
def test_the_engine_follows_from_the_number_of_workers(settings: dict[str, Any], engine: str) -> None:
    assert LaunchConfig(**settings).resolved_engine == engine


def test_workers_are_spread_evenly_over_nodes() -> None:
    assert LaunchConfig(workers=8, nodes=2, rendezvous="node0:29400").workers_per_node == 4


@pytest.mark.parametrize(
    ("strategy", "world_size", "resolved"),
    [("auto", 1, "single"), ("auto", 4, "ddp"), ("fsdp2", 1, "fsdp2"), ("ddp", 1, "ddp"), ("single", 1, "single")],
)
def test_the_strategy_follows_from_the_world_size(strategy: str, world_size: int, resolved: str) -> None:
    assert StrategyConfig(strategy=strategy).resolved_strategy(world_size) == resolved


def test_single_refuses_several_workers() -> None:
    with pytest.raises(ConfigError, match="runs 1 worker, not 2; use ddp, fsdp or fsdp2"):
        StrategyConfig(strategy="single").resolved_strategy(2)


@pytest.mark.parametrize(("strategy", "world_size"), [("auto", 1), ("auto", 2), ("ddp", 2), ("single", 1)])
def test_cpu_offload_is_refused_where_nothing_is_sharded(strategy: str, world_size: int) -> None:
    with pytest.raises(ConfigError, match="--cpu-offload works with --strategy fsdp, fsdp2 or zero, not"):
        StrategyConfig(strategy=strategy, cpu_offload=True).resolved_strategy(world_size)


def test_cpu_offload_is_taken_where_something_is() -> None:
    assert StrategyConfig(strategy="fsdp2", cpu_offload=True).resolved_strategy(2) == "fsdp2"


def test_every_setting_reaches_its_part_and_comes_back_flat() -> None:
    given_by_hand = {"workers": 4, "precision": "bf16", "keep": 7, "seed": 11, "checkpoint_every": "20", "name": "n"}
    config = Config.from_settings(given_by_hand)
    assert (config.launch.workers, config.strategy.precision, config.folder.seed) == (4, "bf16", 11)
    flat = config.flat()
    assert set(flat) == set(SETTINGS)
    assert {name: flat[name] for name in given_by_hand} == given_by_hand
    assert Config.from_settings(flat) == config


def test_no_two_parts_share_a_setting_name() -> None:
    parts = [type(part.default) for part in dataclasses.fields(Config)]
    names = [field.name for part in parts for field in dataclasses.fields(part)]
    assert len(names) == len(set(names)) == len(SETTINGS)


def test_settings_cannot_change_once_made() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().launch.workers = 2  # type: ignore[misc]


def test_every_setting_has_help() -> None:
    assert all(len(field.metadata["help"]) > 10 for field in SETTINGS.values())


def test_a_flag_is_its_settings_name_with_dashes() -> None:
    assert flag("max_failures") == "--max-failures"


def test_ray_is_asked_for_a_range_of_workers_and_what_each_needs() -> None:
    launch = LaunchConfig(
        engine="ray", workers="2:8", cpus_per_worker=4, gpus_per_worker=0.5, resources="A100=1, disk=0.5"
    )
    assert (launch.min_workers, launch.max_workers, launch.is_elastic) == (2, 8, True)
    assert launch.resources_per_worker == {"CPU": 4, "GPU": 0.5, "A100": 1.0, "disk": 0.5}
    assert LaunchConfig(engine="ray", workers=3, cpus_per_worker=0.0).resources_per_worker == {}


def test_sinks_are_named_each_once_and_prometheus_may_have_a_port() -> None:
    assert ObserveConfig().destinations() == {}
    assert ObserveConfig("mlflow, prometheus:9000,wandb").destinations() == {
        "mlflow": None,
        "prometheus": 9000,
        "wandb": None,
    }


@pytest.mark.parametrize(
    ("sinks", "says"),
    [
        ("mlfow", "choose among tensorboard, mlflow, wandb, prometheus, several with commas"),
        ("", "choose among"),
        ("mlflow,", "choose among"),
        ("mlflow,mlflow", "mlflow stands there twice"),
        ("wandb:3", "'wandb:3'; a port, 1 to 65535, goes with prometheus, as prometheus:9000"),
        ("prometheus:", "a port, 1 to 65535"),
        ("prometheus:0", "a port, 1 to 65535"),
        ("prometheus:70000", "a port, 1 to 65535"),
        ("prometheus:http", "a port, 1 to 65535"),
    ],
)
def test_sinks_that_cannot_be(sinks: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ObserveConfig(sinks)
