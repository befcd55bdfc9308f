"""Trains a small GPT on bytes of text: python train.py, torchrun train.py or keepstep run train.py."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from data import keep_batch, load
from model import GPT
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

import keepstep


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--text", help="file to train on; otherwise the source of Python's standard library")
    parser.add_argument("--max-bytes", type=int, default=2_000_000, help="use no more of the text than this")
    parser.add_argument("--held-out", type=float, default=0.02, help="share of the text, its end, for validation")
    parser.add_argument("--steps", type=int, default=200, help="in all; --epochs must divide it")
    parser.add_argument("--epochs", type=int, default=2, help="each ends with a validation")
    parser.add_argument("--batch-size", type=int, default=32, help="windows, of all workers together")
    parser.add_argument("--lr", type=float, default=1e-3, help="the highest of the one-cycle schedule")
    parser.add_argument("--weight-decay", type=float, default=0.1, help="of matrices; vectors have none")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--sequence", type=int, default=128, help="bytes in a window")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--num-workers", type=int, default=0, help="loader processes a worker")
    args = parser.parse_args(argv)
    if args.steps % args.epochs:
        parser.error(f"--epochs {args.epochs} does not divide --steps {args.steps}")
    return args


def loss_of(model: nn.Module, x: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction=reduction)


def decayed(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Weight decay for matrices only: biases and norms have nothing to gain from it."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


@torch.no_grad()
def evaluate(run: keepstep.Run, model: nn.Module, test: DataLoader[tuple[Tensor, ...]], sequence: int) -> Tensor:
    """The mean loss over every held-out byte, however many workers share them."""
    model.eval()
    loss = sum((loss_of(model, x, y, "sum") for x, y in test), start=torch.zeros((), device=run.device))
    model.train()
    mean: Tensor = run.sum(loss) / (len(test.dataset) * sequence)  # type: ignore[arg-type]
    return mean


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    run = keepstep.start()
    cuda = run.device.type == "cuda"

    model = GPT(args.sequence, args.layers, args.heads, args.hidden, args.dropout)
    num_windows = args.steps // args.epochs * args.batch_size
    train_set, test_set = load(args.text, args.max_bytes, args.sequence, num_windows, args.held_out)
    loader = partial(
        DataLoader, batch_size=args.batch_size, num_workers=args.num_workers, collate_fn=keep_batch, pin_memory=cuda
    )
    train, test = loader(train_set, shuffle=True), loader(test_set)
    optimizer = torch.optim.AdamW(decayed(model, args.weight_decay), lr=args.lr, fused=cuda)
    scheduler = OneCycleLR(optimizer, max_lr=args.lr, total_steps=args.steps, cycle_momentum=False)
    model, optimizer, scheduler, train, test = run.prepare(model, optimizer, scheduler, train, test)

    for epoch in run.epochs(args.epochs):
        for x, y in run.steps(train):
            loss = loss_of(model, x, y)
            run.backward(loss)  # loss.backward() does too, except under --precision fp16
            run.clip_grad_norm(model, 1.0)
            run.log(loss=loss, lr=scheduler.get_last_lr()[0])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        validation_loss = evaluate(run, model, test, args.sequence)
        run.log(validation_loss=validation_loss)
        run.print(f"epoch {epoch}: validation loss {validation_loss:.4f}")


if __name__ == "__main__":
    main()
