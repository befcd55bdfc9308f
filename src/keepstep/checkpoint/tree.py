"""Takes nested state apart into JSON and tensors, and puts it together again: what a checkpoint can hold."""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np
import torch

from keepstep.checkpoint.untrusted import shown
from keepstep.errors import CheckpointError
from keepstep.fragment import Fragment

_TAG = "$"
"""A JSON object with this key is not a dict but something that JSON has no word for."""

_DEEPEST = 100
"""How many levels a state may have: what can be written must be readable, wherever on the stack that happens."""

_PLAIN: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (int, int.__int__),
    (float, float.__float__),
    (str, str.__str__),
)
"""A subclass's value as the plain type. `str(value)` would not do: a (str, Enum) answers with its member's name."""

Tensors = dict[str, Any]
"""Tensors, and fragments of them, by their path."""


def split_path(path: str) -> list[str]:
    """The keys that lead to a tensor, outermost first: the opposite of how `take_apart` joins them."""
    return [part.replace("~1", "/").replace("~0", "~") for part in path.split("/")]


def _join(path: str, key: str) -> str:
    # Escaped as in a JSON pointer (RFC 6901): a slash in a key must not make one tensor's path another's.
    return f"{path}/{key.replace('~', '~0').replace('/', '~1')}"


def take_apart(value: Any, path: str, tensors: Tensors, depth: int = 0) -> Any:
    """JSON for `value`; its tensors go into `tensors` under their path."""
    if depth > _DEEPEST:
        raise CheckpointError(f"the state at '{path[:80]}...' has more than {_DEEPEST} levels; does it hold itself?")
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {_TAG: "float", "text": str(value)}
    if isinstance(value, (torch.Tensor, Fragment)):
        tensors[path] = value.detach()
        return {_TAG: "tensor", "key": path}
    if isinstance(value, np.ndarray):
        return {_TAG: "numpy", "array": take_apart(_as_tensor(value, path), path, tensors)}
    if isinstance(value, np.generic):
        item = value.item()
        return _refuse(value, path) if isinstance(item, np.generic) else take_apart(item, path, tensors)
    if isinstance(value, (bytes, bytearray)):
        return {_TAG: "bytes", "base64": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {_TAG: "dtype", "name": str(value).removeprefix("torch.")}
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return _sequence(value, path, tensors, depth + 1)
    if isinstance(value, Mapping):
        return _mapping(value, path, tensors, depth + 1)
    for kind, plain in _PLAIN:  # a subclass of a plain type, as an IntEnum, is kept as that type
        if isinstance(value, kind):
            return take_apart(plain(value), path, tensors)
    _refuse(value, path)


def put_together(json: Any, tensors: Mapping[str, torch.Tensor], depth: int = 0) -> Any:
    """The value that `take_apart` took apart. The JSON may be anybody's: it can name values, never what to call."""
    if depth > 2 * _DEEPEST:  # a tuple is a list in an object: two levels
        raise CheckpointError("the checkpoint's state is nested too deeply")
    if isinstance(json, list):
        return [put_together(part, tensors, depth + 1) for part in json]
    if not isinstance(json, dict):
        return json
    if _TAG not in json:
        return {key: put_together(part, tensors, depth + 1) for key, part in json.items()}
    kind = json[_TAG]
    if not isinstance(kind, str) or kind not in _MAKERS:
        raise CheckpointError(f"the checkpoint holds a {shown(kind)}, which this version of keepstep does not know")
    try:
        return _MAKERS[kind](json, lambda part: put_together(part, tensors, depth + 1), tensors)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"the checkpoint holds a '{kind}' that cannot be read: {shown(error)}") from None


def is_tensor(json: Any) -> bool:
    """Whether a part of a JSON skeleton stands for a tensor."""
    return isinstance(json, dict) and json.get(_TAG) == "tensor" and isinstance(json.get("key"), str)


def tensor_keys(json: Any) -> list[str]:
    """Keys of all tensors that a JSON skeleton refers to, in its order."""
    keys, left = [], [json]
    while left:  # no recursion: how deep it goes is not for us to say
        part = left.pop()
        if isinstance(part, list):
            left += reversed(part)
        elif is_tensor(part):
            keys.append(part["key"])
        elif isinstance(part, dict) and part.get(_TAG) == "tensor":
            raise CheckpointError(f"the checkpoint refers to a tensor {shown(part.get('key'))}, which is no name")
        elif isinstance(part, dict):
            left += reversed(part.values())
    return keys


def _refuse(value: Any, path: str) -> NoReturn:
    of = f" of type {value.dtype}" if isinstance(value, np.ndarray) else ""
    raise CheckpointError(
        f"the state at '{path}' holds a {type(value).__module__}.{type(value).__qualname__}{of}, which a checkpoint "
        "cannot hold without pickle; let state_dict() return numbers, strings, tensors, lists and dicts"
    )


def _as_tensor(array: np.ndarray[Any, Any], path: str) -> torch.Tensor:
    if isinstance(array, np.ma.MaskedArray):  # its mask would be lost
        _refuse(array, path)
    # What torch wants of an array: this machine's byte order, no negative strides, and memory that may be written.
    native = np.require(array, array.dtype.newbyteorder("="), ["C", "W", "E"])
    try:
        return torch.from_numpy(native)
    except TypeError:  # strings, objects, dates, long doubles
        _refuse(array, path)


def _sequence(value: Any, path: str, tensors: Tensors, depth: int) -> Any:
    parts = [take_apart(part, f"{path}/{number}", tensors, depth) for number, part in enumerate(value)]
    if isinstance(value, list):
        return parts
    kind = next(kind.__name__ for kind in (tuple, set, frozenset, deque) if isinstance(value, kind))
    tagged: dict[str, Any] = {_TAG: kind, "items": parts}
    if isinstance(value, deque):
        tagged["maxlen"] = value.maxlen
    return tagged


def _mapping(value: Mapping[Any, Any], path: str, tensors: Tensors, depth: int) -> Any:
    plain_keys = all(type(key) is str for key in value) and _TAG not in value
    if plain_keys and type(value) in (dict, OrderedDict):
        return {key: take_apart(part, _join(path, key), tensors, depth) for key, part in value.items()}
    pairs = [
        [take_apart(each, f"{path}/{n}.{what}", tensors, depth) for what, each in (("key", key), ("value", part))]
        for n, (key, part) in enumerate(value.items())
    ]
    return {_TAG: "counter" if isinstance(value, Counter) else "dict", "pairs": pairs}


_Part = Callable[[Any], Any]
"""Puts together what lies inside."""


def _tensor(json: dict[str, Any], _: _Part, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return tensors[json["key"]]


def _array(json: dict[str, Any], part: _Part, _: Mapping[str, torch.Tensor]) -> Any:
    tensor: torch.Tensor = part(json["array"])
    return tensor.numpy()


def _pairs(json: dict[str, Any], part: _Part) -> dict[Any, Any]:
    return {part(key): part(value) for key, value in json["pairs"]}


def _items(json: dict[str, Any], part: _Part) -> list[Any]:
    return part(_list(json["items"]))  # type: ignore[no-any-return]


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{type(value).__name__} in place of a list")
    return value


def _dtype(json: dict[str, Any], *_: Any) -> torch.dtype:
    # By a table, not by getattr: torch imports some of its attributes when they are first asked for.
    if json["name"] not in _DTYPES:
        raise CheckpointError(f"the checkpoint names a type torch.{json['name']}, which this torch does not have")
    return _DTYPES[json["name"]]


_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_MAKERS: dict[str, Callable[[dict[str, Any], _Part, Mapping[str, torch.Tensor]], Any]] = {
    "tensor": _tensor,
    "float": lambda json, *_: float(json["text"]),
    "numpy": _array,
    "bytes": lambda json, *_: base64.b64decode(json["base64"], validate=True),
    "dtype": _dtype,
    "tuple": lambda json, part, _: tuple(_items(json, part)),
    "set": lambda json, part, _: set(_items(json, part)),
    "frozenset": lambda json, part, _: frozenset(_items(json, part)),
    "deque": lambda json, part, _: deque(_items(json, part), maxlen=json["maxlen"]),
    "dict": lambda json, part, _: _pairs(json, part),
    "counter": lambda json, part, _: Counter(_pairs(json, part)),
}
