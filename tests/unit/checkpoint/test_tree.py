"""State of any shape goes into JSON and tensors, and comes back as it was."""

from __future__ import annotations

import enum
import json
import math
from collections import Counter, OrderedDict, deque, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from keepstep.checkpoint.tree import Tensors, put_together, take_apart, tensor_keys
from keepstep.errors import CheckpointError


def through_json(value: Any, path: str = "state") -> Any:
    """Taken apart, written, read and put together: what a checkpoint does."""
    tensors: Tensors = {}
    text = json.dumps(take_apart(value, path, tensors))
    assert sorted(tensor_keys(json.loads(text))) == sorted(tensors)
    return put_together(json.loads(text), {key: tensor.clone() for key, tensor in tensors.items()})


def same(a: Any, b: Any) -> bool:
    """Equal, of the same type, NaN and all, tensors and arrays included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and same(a.tolist(), b.tolist())
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and same(a.tolist(), b.tolist())
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(ka, kb) and same(va, vb) for (ka, va), (kb, vb) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
keys = st.text(max_size=5) | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text(max_size=2))
tensors_ = st.lists(st.floats(width=32), max_size=4).map(torch.tensor)
arrays = st.lists(st.integers(-5, 5), max_size=4).map(lambda numbers: np.array(numbers, dtype=np.int32))
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
nested = st.recursive(
    plain | tensors_ | arrays | dtypes,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.lists(inner, max_size=3).map(deque)
        | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


@given(nested)
def test_nested_values_come_back_as_they_were(value: Any) -> None:
    assert same(through_json(value), value)


@given(st.sets(st.integers() | st.text() | st.tuples(st.integers(), st.booleans())))
def test_sets_come_back(value: set[Any]) -> None:
    assert through_json(value) == value


@given(st.frozensets(st.integers()))
def test_frozen_sets_stay_frozen(value: frozenset[int]) -> None:
    """They are dict keys and members of sets, where a set cannot be."""
    assert same(through_json(value), value)
    assert through_json({value: 1}) == {value: 1}
    assert through_json({value}) == {value}


@given(st.dictionaries(st.text() | st.integers(), st.integers(), max_size=5))
def test_counters_stay_counters(counts: dict[Any, int]) -> None:
    found = through_json(Counter(counts))
    assert type(found) is Counter
    assert found == Counter(counts) and found["never seen"] == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.0, 5e-324, 1.7976931348623157e308, 0.1 + 0.2])
def test_floats_come_back_to_the_last_bit(value: float) -> None:
    found = through_json({"x": value})["x"]
    assert math.copysign(1, found) == math.copysign(1, value)
    assert same(found, value)


def test_a_real_optimizers_state_comes_back() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.8, 0.99))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    found = through_json(optimizer.state_dict())
    assert same(found, optimizer.state_dict())
    assert type(found["param_groups"][0]["betas"]) is tuple
    optimizer.load_state_dict(found)


@pytest.mark.parametrize(
    "value",
    [
        {"$": "tensor", "key": "other"},
        {"$": None},
        {"a": {"$": 1}},
        [{"$": "unknown"}],
        {1: "a", "1": "b"},
        {True: 1, "True": 2},
        {None: 0, "null": 1},
        {"": {"": 1}},
    ],
)
def test_keys_that_look_like_the_formats_own_are_harmless(value: Any) -> None:
    assert same(through_json(value), value)


@pytest.mark.parametrize(
    "value",
    [
        {"a/b": torch.zeros(2), "a": {"b": torch.ones(2)}},
        {"a": {"b/c": torch.zeros(2)}, "a/b": {"c": torch.ones(2)}},
        {"x": {1: torch.zeros(2)}, "x/0.value": torch.ones(2)},
        {"l": [torch.zeros(2)], "l/0": torch.ones(2)},
        {"n": np.zeros(2), "n/": {"": np.ones(2)}},
    ],
)
def test_tensors_are_never_taken_for_each_other(value: Any) -> None:
    """Whatever their keys are, a slash in them included."""
    assert same(through_json(value), value)


numbered = st.integers(0, 1000).map(torch.tensor)
slashed = st.dictionaries(st.sampled_from(["a", "b", "a/b", "b/a", "a/a/b", "0", "a/0", "/", ""]), numbered, max_size=5)


@given(st.dictionaries(st.sampled_from(["a", "b", "a/b", "b/a", ""]), slashed | st.lists(numbered), max_size=4))
def test_no_two_tensors_share_a_key(value: dict[str, Any]) -> None:
    assert same(through_json(value), value)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3),
        np.arange(6).reshape(2, 3).T,
        np.arange(6)[::-1],
        np.zeros((0, 3), dtype=np.float16),
        np.array(5.0),
        np.array([True, False]),
        np.array([2**63], dtype=np.uint64),
        np.arange(3, dtype=">f8"),
    ],
    ids=["plain", "transposed", "reversed", "empty", "0-d", "bool", "uint64", "big-endian"],
)
def test_arrays_come_back_with_shape_and_values(array: Any) -> None:
    found = through_json(array)
    assert isinstance(found, np.ndarray)
    assert found.shape == array.shape
    assert found.dtype == array.dtype.newbyteorder("=")
    assert found.tolist() == array.tolist()


def test_a_read_only_array_is_taken_without_a_warning() -> None:
    array = np.arange(3)
    array.flags.writeable = False
    assert through_json(array).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("value", "expected"),
    [(np.float32(0.5), 0.5), (np.int64(7), 7), (np.bool_(True), True), (np.str_("text"), "text")],
)
def test_numpys_numbers_become_pythons(value: Any, expected: Any) -> None:
    assert same(through_json(value), expected)


class Level(enum.IntEnum):
    LOW = 3


class Name(str, enum.Enum):  # noqa: UP042
    ONE = "one"


class Text(str):
    pass


@pytest.mark.parametrize(
    ("value", "expected"), [(Level.LOW, 3), (Name.ONE, "one"), (Text("text"), "text"), ([Level.LOW], [3])]
)
def test_subclasses_of_plain_types_are_kept_as_their_value(value: Any, expected: Any) -> None:
    assert same(through_json(value), expected)


def test_kinds_of_sequences_and_mappings_are_kept_as_far_as_json_allows() -> None:
    point = namedtuple("point", "x y")
    assert through_json(point(1, [2])) == (1, [2])
    assert through_json(torch.Size([2, 3])) == (2, 3)
    assert through_json(OrderedDict(b=1, a=2)) == {"b": 1, "a": 2}
    assert list(through_json({"b": 1, "a": 2})) == ["b", "a"]
    found = through_json(deque([1, 2], maxlen=2))
    assert type(found) is deque and found.maxlen == 2
    assert through_json(bytearray(b"\x00\xff")) == b"\x00\xff"


def test_tensors_are_handed_over_not_copied() -> None:
    """The one copy is the snapshot's."""
    tensors: Tensors = {}
    weight = nn.Parameter(torch.ones(2))
    take_apart({"w": weight}, "model", tensors)
    assert list(tensors) == ["model/w"]
    assert tensors["model/w"].data_ptr() == weight.data_ptr()
    assert not tensors["model/w"].requires_grad


class Custom:
    pass


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (Custom(), "Custom"),
        (Path("x"), "PosixPath"),
        (lambda: None, "builtins.function"),
        (torch.device("cpu"), "torch.device"),
        (1j, "builtins.complex"),
        (np.datetime64("2020-01-01"), "datetime.date"),
        (np.longdouble(1), "longdouble"),
        (np.array(["text"]), "ndarray"),
        (np.array([None], dtype=object), "ndarray"),
    ],
)
def test_what_only_pickle_could_hold_is_refused_with_its_place(value: Any, kind: str) -> None:
    with pytest.raises(CheckpointError) as error:
        take_apart({"a": [0, value]}, "tracked", {})
    assert "the state at 'tracked/a/1'" in str(error.value)
    assert kind in str(error.value)
    assert "let state_dict() return numbers, strings, tensors, lists and dicts" in str(error.value)


def test_a_kind_from_a_later_version_is_named() -> None:
    with pytest.raises(CheckpointError, match="holds a 'quaternion', which this version of keepstep does not know"):
        put_together({"$": "quaternion"}, {})


@pytest.mark.parametrize("name", ["float99", "nn", "load"])
def test_a_type_that_torch_lacks_is_named(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"names a type torch.{name}, which this torch does not have"):
        put_together({"$": "dtype", "name": name}, {})


def nested_in(kind: Any, levels: int) -> Any:
    value: Any = torch.ones(1)
    for _ in range(levels):
        value = kind(value)
    return value


@pytest.mark.parametrize(
    "kind", [lambda v: [v], lambda v: (v,), lambda v: {"k": v}, lambda v: {1: v}, lambda v: deque([v])]
)
def test_what_is_not_too_deep_to_be_written_is_not_too_deep_to_be_read(kind: Any) -> None:
    through_json(nested_in(kind, 100))
    with pytest.raises(CheckpointError, match="has more than 100 levels; does it hold itself"):
        take_apart(nested_in(kind, 101), "state", {})


def test_a_state_that_holds_itself_is_refused() -> None:
    state: dict[str, Any] = {}
    state["self"] = [state]
    with pytest.raises(CheckpointError, match="does it hold itself"):
        take_apart(state, "tracked", {})
