"""What Ray Train's controller, a process of its own, does for keepstep."""

from __future__ import annotations

from typing import Any

import ray
from ray.train.v2._internal.execution.callback import ControllerCallback


class SaveBeforeResize(ControllerCallback):  # type: ignore[misc]
    """Has the workers save before Ray Train replaces their hosts by more or fewer: no step is made twice."""

    def __init__(self, coordinator: Any, timeout_s: float) -> None:
        self._coordinator, self._timeout_s = coordinator, timeout_s
        self._is_after_failure = False

    def before_controller_execute_failure_decision(self, *_: Any, **__: Any) -> None:
        self._is_after_failure = True

    def before_controller_execute_resize_decision(self, *_: Any, **__: Any) -> None:
        if not self._is_after_failure:  # then there is nobody to save
            ray.get(self._coordinator.pause.remote(self._timeout_s))
        self._is_after_failure = False
