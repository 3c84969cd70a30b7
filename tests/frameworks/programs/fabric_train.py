"""A loop on Lightning Fabric. Nothing in it knows Phalanx, unless `--strategy` names it.

fabric_train.py FOLDER [--resume] [--accumulate N] [--strategy NAME]
"""

import argparse
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--resume", action="store_true")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--strategy", default="ddp")
args = parser.parse_args()
if args.strategy == "phalanx":
    import phalanx.compose.lightning  # noqa: F401  # registers the name

fabric = Fabric(accelerator="cpu", devices=2, strategy=args.strategy)
fabric.launch()
fabric.seed_everything(7, verbose=False)
data = TensorDataset(torch.randn(48, 6), torch.randn(48, 2))
model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(DataLoader(data, batch_size=4))
wrapper = type(model._forward_module)


def epoch() -> None:
    for index, (x, y) in enumerate(loader, 1):
        accumulating = index % args.accumulate != 0
        with fabric.no_backward_sync(model, enabled=accumulating):
            fabric.backward(nn.functional.mse_loss(model(x), y) / args.accumulate)
        if not accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()


epoch()
if args.resume:
    state = {"model": model, "optimizer": optimizer}
    fabric.save(Path(args.folder) / "state.ckpt", state)
    fabric.barrier()
    epoch()
    fabric.load(Path(args.folder) / "state.ckpt", state)
epoch()
loss = fabric.all_reduce(nn.functional.mse_loss(model(data.tensors[0]), data.tensors[1]).detach())
torch.save(
    {
        "weights": model.state_dict(),
        "loss": loss,
        "class": f"{wrapper.__module__}.{wrapper.__qualname__}",
        "backend": torch.distributed.get_backend(),
    },
    f"{args.folder}/rank{fabric.global_rank}.pt",
)
