"""Divide a test set between workers so that accuracy is exact.

This is what DistributedSampler does: it repeats the first samples until every worker has as many. Repeated samples
count twice, and the accuracy is that of another test set. Return each worker's sample numbers so that every sample is
in exactly one share, and no share is more than one larger than another. Check: keepstep workshop 1 --check
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def share(num_samples: int, rank: int, world_size: int) -> Sequence[int]:
    per_worker = math.ceil(num_samples / world_size)
    return [number % num_samples for number in range(rank * per_worker, (rank + 1) * per_worker)]
