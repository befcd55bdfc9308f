"""Trains ResNet-18 on MNIST: python train.py, torchrun train.py or keepstep run train.py."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from data import keep_batch, load, normalise
from model import ResNet18
from torch import Tensor, nn
from torch.utils.data import DataLoader

import keepstep


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=128, help="of all workers together")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--width", type=int, default=1, help="divide every layer's channels by this, for quick tries")
    parser.add_argument("--data", help="folder with MNIST; otherwise $KEEPSTEP_DATA, the cache or a download")
    parser.add_argument("--limit", type=int, help="use the first LIMIT training and test images only")
    parser.add_argument("--num-workers", type=int, default=0, help="loader processes a worker")
    return parser.parse_args(argv)


@torch.no_grad()
def evaluate(run: keepstep.Run, model: nn.Module, test: DataLoader[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor]:
    """Loss and accuracy over the whole test set, however many workers share it."""
    model.eval()
    loss, correct = torch.zeros(2, device=run.device).unbind()
    for images, labels in test:
        logits = model(normalise(images))
        loss = loss + F.cross_entropy(logits, labels, reduction="sum")
        correct = correct + (logits.argmax(1) == labels).sum()
    model.train()
    num_samples = len(test.dataset)  # type: ignore[arg-type]
    return run.sum(loss) / num_samples, run.sum(correct) / num_samples


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    run = keepstep.start()
    cuda = run.device.type == "cuda"

    model = ResNet18(width_divisor=args.width)
    train_set, test_set = load(args.data, args.limit)
    loader = partial(
        DataLoader, batch_size=args.batch_size, num_workers=args.num_workers, collate_fn=keep_batch, pin_memory=cuda
    )
    train, test = loader(train_set, shuffle=True), loader(test_set)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=cuda)
    model, optimizer, train, test = run.prepare(model, optimizer, train, test)

    for epoch in run.epochs(args.epochs):
        for images, labels in run.steps(train):
            loss = F.cross_entropy(model(normalise(images)), labels)
            run.backward(loss)  # loss.backward() does too, except under --precision fp16
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
        test_loss, accuracy = evaluate(run, model, test)
        run.log(test_loss=test_loss, accuracy=accuracy)
        run.print(f"epoch {epoch}: test loss {test_loss:.4f}, accuracy {accuracy:.2%}")


if __name__ == "__main__":
    main()
