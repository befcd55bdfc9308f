"""Report what all workers have seen.

ray.train.report(metrics) passes on what rank 0 says, and adds up nothing. Each worker knows the sum of its losses, how
many images it had right, and how many it had. Return what every worker should report: "loss" and "accuracy" over all.
`all_reduce(list_of_numbers)` returns their sums over the workers, and waits until all have called it.
Check: keepstep workshop 2 --check
"""

from __future__ import annotations

from collections.abc import Callable

AllReduce = Callable[[list[float]], list[float]]


def metrics(loss_sum: float, correct: int, num_images: int, all_reduce: AllReduce) -> dict[str, float]:
    return {"loss": loss_sum / num_images, "accuracy": correct / num_images}
