"""Trains a Vision Transformer on CIFAR-10: python train.py, torchrun train.py or keepstep run train.py."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from data import augment, keep_batch, load, normalise
from model import ViT
from torch import Tensor, nn
from torch.optim.lr_scheduler import ConstantLR, LRScheduler, OneCycleLR
from torch.utils.data import DataLoader

import keepstep


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=512, help="of all workers together")
    parser.add_argument("--lr", type=float, default=1e-3, help="the highest, with the one-cycle schedule")
    parser.add_argument("--weight-decay", type=float, default=1e-2)
    parser.add_argument("--schedule", choices=["constant", "onecycle"], default="onecycle")
    parser.add_argument("--augment", action="store_true", help="random crop (padding 4) and flip")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--mlp", type=int, default=768)
    parser.add_argument("--data", help="folder with CIFAR-10; otherwise $KEEPSTEP_DATA, the cache or a download")
    parser.add_argument("--limit", type=int, help="use the first LIMIT training and test images only")
    parser.add_argument("--num-workers", type=int, default=0, help="loader processes a worker")
    return parser.parse_args(argv)


def make_scheduler(optimizer: torch.optim.Optimizer, args: argparse.Namespace, num_steps: int) -> LRScheduler:
    if args.schedule == "constant":
        return ConstantLR(optimizer, factor=1.0, total_iters=0)
    return OneCycleLR(optimizer, max_lr=args.lr, total_steps=num_steps, cycle_momentum=False)


@torch.no_grad()
def evaluate(run: keepstep.Run, model: nn.Module, test: DataLoader[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor]:
    """Loss and accuracy over the whole test set, however many workers share it."""
    model.eval()
    loss, correct = torch.zeros(2, device=run.device).unbind()
    for images, labels, _ in test:
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

    model = ViT(num_layers=args.layers, num_heads=args.heads, hidden=args.hidden, mlp=args.mlp)
    train_set, test_set = load(args.data, args.limit)
    loader = partial(
        DataLoader, batch_size=args.batch_size, num_workers=args.num_workers, collate_fn=keep_batch, pin_memory=cuda
    )
    train, test = loader(train_set, shuffle=True), loader(test_set)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay, fused=cuda)
    scheduler = make_scheduler(optimizer, args, num_steps=len(train) * args.epochs)
    model, optimizer, scheduler, train, test = run.prepare(model, optimizer, scheduler, train, test)

    for epoch in run.epochs(args.epochs):
        for images, labels, randoms in run.steps(train):
            images = augment(images, randoms) if args.augment else images
            loss = F.cross_entropy(model(normalise(images)), labels)
            run.backward(loss)  # loss.backward() does too, except under --precision fp16
            run.log(loss=loss, lr=scheduler.get_last_lr()[0])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        test_loss, accuracy = evaluate(run, model, test)
        run.log(test_loss=test_loss, accuracy=accuracy)
        run.print(f"epoch {epoch}: test loss {test_loss:.4f}, accuracy {accuracy:.2%}")


if __name__ == "__main__":
    main()
