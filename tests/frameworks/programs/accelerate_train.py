"""An Accelerate script as its users write them: nothing in it knows Phalanx.

    accelerate_train.py FOLDER [--resume] [--accumulate N] [--by-hand] [--comm-hook]

Saves what it ends with to FOLDER/rank0.pt, FOLDER/rank1.pt.
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--resume", action="store_true", help="save the state half way, and start again from it")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--by-hand", action="store_true", help="no_sync and trigger_sync_in_backward")
parser.add_argument("--comm-hook", action="store_true", help="send float16")
args = parser.parse_args()

set_seed(7)
handlers = [DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)] if args.comm_hook else []
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.accumulate, kwargs_handlers=handlers)
data = TensorDataset(torch.randn(48, 6), torch.randn(48, 2))
model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4), scheduler)
wrapper = type(model)
loss_fn = nn.MSELoss()


def epoch() -> None:
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = loss_fn(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def epoch_by_hand() -> None:
    batches = list(loader)
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        with accelerator.no_sync(model):
            loss_a, loss_b = loss_fn(model(first[0]), first[1]), loss_fn(model(second[0]), second[1])
        accelerator.backward(loss_a)
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(loss_b)
        optimizer.step()
        optimizer.zero_grad()


run = epoch_by_hand if args.by_hand else epoch
run()
if args.resume:
    accelerator.save_state(f"{args.folder}/state")
    accelerator.wait_for_everyone()
    run()  # a detour: the state that is loaded must undo it
    accelerator.load_state(f"{args.folder}/state")
run()

mean_loss = accelerator.gather(loss_fn(model(data.tensors[0]), data.tensors[1]).detach()).mean()
torch.save(
    {
        "weights": accelerator.unwrap_model(model).state_dict(),
        "loss": mean_loss,
        "class": f"{wrapper.__module__}.{wrapper.__qualname__}",
        "backend": torch.distributed.get_backend(),
    },
    f"{args.folder}/rank{accelerator.process_index}.pt",
)
accelerator.end_training()
