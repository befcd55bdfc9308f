"""Exercise 3: what a search costs.

Write `num_epochs(trials, epochs, keep)`: how many epochs are trained in all if after 1 epoch one in `keep` of the
trials goes on, after `keep` epochs one in `keep` of those, after `keep` ** 2 epochs again, and so on, until the rest
has trained `epochs` epochs. One in `keep` is rounded down, but one always goes on. (Here all trials of a rung are
compared at once. ASHA does not wait for them, and so may let more go on.)

With 9 trials of 9 epochs and keep 3: 9 trials train 1 epoch, 3 of them go on to 3, 1 of them to 9: 9 + 6 + 6 = 21.
A grid would take 81.
"""

from __future__ import annotations


def num_epochs(trials: int, epochs: int, keep: int) -> int:
    raise NotImplementedError
