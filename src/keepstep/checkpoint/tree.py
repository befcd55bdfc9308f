"""Takes nested state apart into JSON and tensors, and puts it together again: what a checkpoint can hold."""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np
import torch

from keepstep.errors import CheckpointError

_TAG = "$"
"""A JSON object with this key is not a dict but something that JSON has no word for."""

_PLAIN: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (int, int.__int__),
    (float, float.__float__),
    (str, str.__str__),
)
"""A subclass's value as the plain type. `str(value)` would not do: a (str, Enum) answers with its member's name."""

Tensors = dict[str, torch.Tensor]


def split_path(path: str) -> list[str]:
    """The keys that lead to a tensor, outermost first: the opposite of how `take_apart` joins them."""
    return [part.replace("~1", "/").replace("~0", "~") for part in path.split("/")]


def _join(path: str, key: str) -> str:
    # Escaped as in a JSON pointer (RFC 6901): a slash in a key must not make one tensor's path another's.
    return f"{path}/{key.replace('~', '~0').replace('/', '~1')}"


def take_apart(value: Any, path: str, tensors: Tensors) -> Any:
    """JSON for `value`; its tensors go into `tensors` under their path."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {_TAG: "float", "text": str(value)}
    if isinstance(value, torch.Tensor):
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
        return _sequence(value, path, tensors)
    if isinstance(value, Mapping):
        return _mapping(value, path, tensors)
    for kind, plain in _PLAIN:  # a subclass of a plain type, as an IntEnum, is kept as that type
        if isinstance(value, kind):
            return take_apart(plain(value), path, tensors)
    _refuse(value, path)


def put_together(json: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The value that `take_apart` took apart."""
    if isinstance(json, list):
        return [put_together(part, tensors) for part in json]
    if not isinstance(json, dict):
        return json
    kind = json.get(_TAG)
    if kind is None:
        return {key: put_together(part, tensors) for key, part in json.items()}
    if kind not in _MAKERS:
        raise CheckpointError(f"the checkpoint holds a '{kind}', which this version of keepstep does not know")
    return _MAKERS[kind](json, tensors)


def tensor_keys(json: Any) -> list[str]:
    """Keys of all tensors that a JSON skeleton refers to."""
    if isinstance(json, list):
        return [key for part in json for key in tensor_keys(part)]
    if not isinstance(json, dict):
        return []
    if json.get(_TAG) == "tensor":
        return [str(json["key"])]
    return [key for part in json.values() for key in tensor_keys(part)]


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


def _sequence(value: Any, path: str, tensors: Tensors) -> Any:
    parts = [take_apart(part, f"{path}/{number}", tensors) for number, part in enumerate(value)]
    if isinstance(value, list):
        return parts
    kind = next(kind.__name__ for kind in (tuple, set, frozenset, deque) if isinstance(value, kind))
    tagged: dict[str, Any] = {_TAG: kind, "items": parts}
    if isinstance(value, deque):
        tagged["maxlen"] = value.maxlen
    return tagged


def _mapping(value: Mapping[Any, Any], path: str, tensors: Tensors) -> Any:
    plain_keys = all(type(key) is str for key in value) and _TAG not in value
    if plain_keys and type(value) in (dict, OrderedDict):
        return {key: take_apart(part, _join(path, key), tensors) for key, part in value.items()}
    pairs = [
        [take_apart(key, f"{path}/{n}.key", tensors), take_apart(part, f"{path}/{n}.value", tensors)]
        for n, (key, part) in enumerate(value.items())
    ]
    return {_TAG: "counter" if isinstance(value, Counter) else "dict", "pairs": pairs}


def _array(json: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    tensor: torch.Tensor = put_together(json["array"], tensors)
    return tensor.numpy()


def _pairs(json: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[Any, Any]:
    return {put_together(k, tensors): put_together(v, tensors) for k, v in json["pairs"]}


def _items(json: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> list[Any]:
    return [put_together(part, tensors) for part in json["items"]]


def _dtype(json: dict[str, Any], _: Mapping[str, torch.Tensor]) -> torch.dtype:
    dtype = getattr(torch, json["name"], None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"the checkpoint names a type torch.{json['name']}, which this torch does not have")
    return dtype


_MAKERS: dict[str, Callable[[dict[str, Any], Mapping[str, torch.Tensor]], Any]] = {
    "tensor": lambda json, tensors: tensors[json["key"]],
    "float": lambda json, _: float(json["text"]),
    "numpy": _array,
    "bytes": lambda json, _: base64.b64decode(json["base64"]),
    "dtype": _dtype,
    "tuple": lambda json, tensors: tuple(_items(json, tensors)),
    "set": lambda json, tensors: set(_items(json, tensors)),
    "frozenset": lambda json, tensors: frozenset(_items(json, tensors)),
    "deque": lambda json, tensors: deque(_items(json, tensors), maxlen=json["maxlen"]),
    "dict": _pairs,
    "counter": lambda json, tensors: Counter(_pairs(json, tensors)),
}
