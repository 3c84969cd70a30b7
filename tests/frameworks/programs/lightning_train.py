"""A run of Lightning's Trainer. Nothing in it knows Phalanx, unless `--strategy` names it.

lightning_train.py FOLDER [--resume] [--accumulate N] [--manual] [--static] [--unused] [--strategy NAME]
"""

import argparse
import logging
import warnings

import torch
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--resume", action="store_true")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--manual", action="store_true", help="manual optimization, two backward passes a step")
parser.add_argument("--static", action="store_true")
parser.add_argument("--unused", action="store_true", help="a layer that the loss does not reach")
parser.add_argument("--strategy", default="ddp")
args = parser.parse_args()
if args.strategy == "phalanx":
    import phalanx.compose.lightning  # noqa: F401  # registers the name
warnings.filterwarnings("ignore")
logging.getLogger("lightning").setLevel(logging.ERROR)


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))
        if args.unused:
            self.spare = nn.Linear(3, 3)
        self.automatic_optimization = not args.manual
        self.wrapper = ""

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor | None:
        wrapper = type(self.trainer.strategy.model)
        self.wrapper = f"{wrapper.__module__}.{wrapper.__qualname__}"
        loss = nn.functional.mse_loss(self.body(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        optimizer.step()
        return None

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.body(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def trainer(epochs: int) -> Trainer:
    strategy = args.strategy
    if args.static or args.unused:
        strategy = DDPStrategy(static_graph=args.static, find_unused_parameters=args.unused)
    return Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=epochs,
        accumulate_grad_batches=args.accumulate,
        callbacks=[ModelCheckpoint(dirpath=f"{args.folder}/checkpoints", save_last=True)],
        default_root_dir=args.folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        log_every_n_steps=1,
    )


def loader() -> DataLoader:
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(48, 6, generator=generator), torch.randn(48, 2, generator=generator))
    return DataLoader(data, batch_size=4)


seed_everything(7, verbose=False)
net = Net()
if args.resume:
    trainer(1).fit(net, loader(), loader())
    seed_everything(8, verbose=False)
    net = Net()
run = trainer(2)
run.fit(net, loader(), loader(), ckpt_path=f"{args.folder}/checkpoints/last.ckpt" if args.resume else None)
torch.save(
    {
        "weights": net.state_dict(),
        "loss": run.callback_metrics["val_loss"],
        "class": net.wrapper,
        "backend": torch.distributed.get_backend(),
    },
    f"{args.folder}/rank{run.global_rank}.pt",
)
