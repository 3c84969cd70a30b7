"""Accelerate with Phalanx said in the script: plugin_train.py FOLDER [backend]."""

import sys

import torch
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx.compose.accelerate import PhalanxPlugin

folder, backend = sys.argv[1], (sys.argv[2] if len(sys.argv) > 2 else None)
set_seed(7)
plugin = PhalanxPlugin(backend=backend, ddp={"gradient_as_bucket_view": True})
accelerator = plugin.accelerator(cpu=True, gradient_accumulation_steps=2)
data = TensorDataset(torch.randn(48, 6), torch.randn(48, 2))
model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4), scheduler)
assert model.gradient_as_bucket_view
wrapper = type(model)
for _ in range(2):
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
loss = nn.functional.mse_loss(model(data.tensors[0]), data.tensors[1]).detach()
torch.save(
    {
        "weights": accelerator.unwrap_model(model).state_dict(),
        "loss": accelerator.gather(loss).mean(),
        "class": f"{wrapper.__module__}.{wrapper.__qualname__}",
        "backend": torch.distributed.get_backend(),
    },
    f"{folder}/rank{accelerator.process_index}.pt",
)
accelerator.end_training()
