"""Train a small convolutional net on scikit-learn's handwritten digits, on as many ranks as the launcher starts.

    torchrun --standalone --nproc-per-node 2 examples/digits.py

Ends with status 1 when fewer than 97 % of the test digits are recognised.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import phalanx as px

REQUIRED_ACCURACY = 0.97


class Net(nn.Module):
    """Two convolutions and a classifier, for 8 x 8 images."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images))


def load(device: torch.device) -> tuple[TensorDataset, TensorDataset]:
    """The digits, split in the same way on every rank."""
    digits = load_digits()
    split = train_test_split(digits.images / 16.0, digits.target, test_size=0.2, random_state=0, stratify=digits.target)
    train_x, test_x = (torch.as_tensor(x, dtype=torch.float32).unsqueeze(1) for x in split[:2])
    train_y, test_y = (torch.as_tensor(y) for y in split[2:])
    return TensorDataset(train_x.to(device), train_y.to(device)), TensorDataset(test_x.to(device), test_y.to(device))


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """The share of `data` that the model recognises. Each rank looks at its part; all get the same answer."""
    model.eval()
    images, labels = (t[dist.get_rank() :: dist.get_world_size()] for t in data.tensors)
    num_right = (model(images).argmax(1) == labels).sum()
    counts = torch.stack([num_right, torch.full_like(num_right, len(labels))]).double()
    dist.all_reduce(counts)
    model.train()
    return float(counts[0] / counts[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    args = parser.parse_args()

    world = px.init()
    console = Console(quiet=world.rank != 0)  # rank 0 alone speaks
    torch.manual_seed(0)

    train, test = load(world.device)
    sampler = DistributedSampler(train, shuffle=True, seed=0)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler)
    model = px.replicate(Net().to(world.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=args.epochs * len(loader))
    loss_fn = nn.CrossEntropyLoss()

    console.print(f"training on {len(train)} digits, world size {world.world_size}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    num_samples, training_s = 0, 0.0
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("epoch 1", total=args.epochs * len(loader))
        for epoch in range(args.epochs):
            sampler.set_epoch(epoch)
            started = time.perf_counter()
            for images, labels in loader:
                loss = loss_fn(model(images), labels)
                loss.backward()  # gradients are averaged across ranks when this returns
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                num_samples += len(labels) * world.world_size
                progress.advance(task)
            training_s += time.perf_counter() - started
            progress.update(task, description=f"epoch {epoch + 1}, loss {loss.item():.4f}")

    reached = accuracy(model, test)
    waiting = px.step_stats(model).waited_s / training_s
    console.print(
        f"test accuracy {reached:.1%}, {num_samples / training_s:,.0f} samples/s, "
        f"{waiting:.1%} of the step spent waiting for communication, world size {world.world_size}"
    )
    # Ranks leave together. It also gives Gloo's thread time to let go of the last tensor: on torch 2.13 a process that
    # ends within moments of a collective can abort, when that thread asks for the interpreter's lock too late.
    dist.barrier()
    px.shutdown()
    if reached < REQUIRED_ACCURACY:
        console.print(f"that is below {REQUIRED_ACCURACY:.0%}: something is wrong")
        sys.exit(1)


if __name__ == "__main__":
    main()
