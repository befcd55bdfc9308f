"""Tells right answers to this lesson's exercises from wrong ones."""

from __future__ import annotations

import copy
from collections import Counter
from types import ModuleType

import torch

from common.checks import expect


def check_1(answer: ModuleType) -> None:
    attempt = answer.Attempt
    undisturbed = [attempt(0, [(1, [0, 1]), (2, [2, 3])])]
    expect(answer.in_the_weights(undisturbed) == [0, 1, 2, 3], "an undisturbed training consumed all it notes")
    redone = [attempt(0, [(1, [0]), (2, [1]), (3, [2])]), attempt(1, [(2, [1]), (3, [2])])]
    expect(
        answer.in_the_weights(redone) == [0, 1, 2],
        "steps 2 and 3 were lost with their worker and made again from step 1: their samples count once",
    )
    repeated = [attempt(0, [(1, [0]), (2, [1])]), attempt(1, [(2, [0]), (3, [1])])]
    expect(
        answer.in_the_weights(repeated) == [0, 0, 1],
        "an epoch begun again from step 1's weights has sample 0 twice in them: do not drop what was really repeated",
    )
    twice = [attempt(0, [(1, [0]), (2, [1]), (3, [2])]), attempt(2, [(3, [2])]), attempt(1, [(2, [5]), (3, [6])])]
    expect(
        answer.in_the_weights(twice) == [0, 5, 6],
        "an attempt may go on from an older step than the one before it: then that one's steps are gone, too",
    )
    shorter = [attempt(0, [(1, [0]), (2, [1]), (3, [2]), (4, [3])]), attempt(2, [(3, [2])])]
    expect(
        answer.in_the_weights(shorter) == [0, 1, 2],
        "the last attempt went on from step 2 and ended after step 3: an older step 4 is not in its weights",
    )


def check_2(answer: ModuleType) -> None:
    for num_samples, batch_size, done, num_workers, epoch in [(24, 6, 2, 2, 0), (24, 6, 1, 3, 1), (25, 4, 5, 4, 3)]:
        parts = [
            answer.remaining(num_samples, batch_size, done, rank, num_workers, 7, epoch) for rank in range(num_workers)
        ]
        trained = answer.order(num_samples, 7, epoch)[: done * batch_size]
        found = Counter(sample for part in parts for sample in part)
        again = set(trained) & set(found)
        expect(not again, f"{len(again)} samples of the {done} batches that were done are trained again")
        lost = set(range(num_samples)) - set(trained) - set(found)
        expect(not lost, f"with {num_workers} workers {len(lost)} samples of the epoch are trained by nobody")
        expect(max(found.values(), default=1) == 1, f"with {num_workers} workers two of them train the same samples")
        sizes = [len(part) for part in parts]
        expect(max(sizes) - min(sizes) <= 1, f"the workers have {sizes} samples: share them evenly")


def check_3(answer: ModuleType) -> None:
    weights = [torch.tensor([float(step), -1.0]) for step in range(8)]
    undisturbed = answer.Average(weights[0])
    for each in weights[:4]:
        undisturbed.update(each)
    saved = undisturbed.state_dict()
    as_it_was = copy.deepcopy(saved)
    for each in weights[4:]:
        undisturbed.update(each)
    same = all(torch.equal(torch.as_tensor(saved[name]), torch.as_tensor(as_it_was[name])) for name in as_it_was)
    expect(same, "what state_dict returned has changed while training went on: return a copy of the tensor")
    for _ in range(2):  # a checkpoint may be read again
        resumed = answer.Average(weights[0])
        resumed.load_state_dict(as_it_was)
        for each in weights[4:]:
            resumed.update(each)
        expect(
            torch.equal(resumed.value, undisturbed.value),
            "after a restart the average is another one: save all that the next update needs, and copy what is loaded",
        )
