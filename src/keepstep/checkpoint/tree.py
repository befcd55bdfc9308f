"""Takes nested state apart into JSON and tensors, and puts it together again: what a checkpoint can hold."""

from __future__ import annotations

import base64
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from keepstep.errors import CheckpointError

_TAG = "$"
"""A JSON object with this key is not a dict but something that JSON has no word for."""

Tensors = dict[str, torch.Tensor]


def take_apart(value: Any, path: str, tensors: Tensors) -> Any:
    """JSON for `value`; its tensors go into `tensors` under their path."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor):
        tensors[path] = value.detach()
        return {_TAG: "tensor", "key": path}
    if isinstance(value, np.ndarray):
        return {_TAG: "numpy", "array": take_apart(torch.from_numpy(np.ascontiguousarray(value)), path, tensors)}
    if isinstance(value, np.generic):
        return take_apart(value.item(), path, tensors)
    if isinstance(value, (bytes, bytearray)):
        return {_TAG: "bytes", "base64": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {_TAG: "dtype", "name": str(value).removeprefix("torch.")}
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return _sequence(value, path, tensors)
    if isinstance(value, Mapping):
        return _mapping(value, path, tensors)
    for kind in (bool, int, float, str):  # a subclass of a plain type, as an IntEnum, is kept as that type
        if isinstance(value, kind):
            return kind(value)
    raise CheckpointError(
        f"the state at '{path}' holds a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot "
        "hold without pickle; let state_dict() return numbers, strings, tensors, lists and dicts"
    )


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


def _sequence(value: Any, path: str, tensors: Tensors) -> Any:
    parts = [take_apart(part, f"{path}/{number}", tensors) for number, part in enumerate(value)]
    if type(value) is list:
        return parts
    kind = "tuple" if isinstance(value, tuple) else "set" if isinstance(value, (set, frozenset)) else "deque"
    if isinstance(value, list):
        return parts
    tagged: dict[str, Any] = {_TAG: kind, "items": parts}
    if isinstance(value, deque):
        tagged["maxlen"] = value.maxlen
    return tagged


def _mapping(value: Mapping[Any, Any], path: str, tensors: Tensors) -> Any:
    plain_keys = all(type(key) is str for key in value) and _TAG not in value
    if plain_keys and type(value) in (dict, OrderedDict):
        return {key: take_apart(part, f"{path}/{key}", tensors) for key, part in value.items()}
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
    "numpy": _array,
    "bytes": lambda json, _: base64.b64decode(json["base64"]),
    "dtype": _dtype,
    "tuple": lambda json, tensors: tuple(_items(json, tensors)),
    "set": lambda json, tensors: set(_items(json, tensors)),
    "deque": lambda json, tensors: deque(_items(json, tensors), maxlen=json["maxlen"]),
    "dict": _pairs,
    "counter": lambda json, tensors: Counter(_pairs(json, tensors)),
}
