"""Where metrics are also sent to: TensorBoard, MLflow, W&B, Prometheus. One file each, imported when it is used."""

from keepstep.observe.sinks.base import About, Sink
from keepstep.observe.sinks.fan_out import Sinks
from keepstep.observe.sinks.registry import check_installed

__all__ = ["About", "Sink", "Sinks", "check_installed"]
