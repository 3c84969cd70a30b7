"""A run of Transformers' Trainer on a tiny language model made on the spot. Nothing in it knows Phalanx.

transformers_train.py FOLDER [--resume] [--accumulate N] [--gradient-checkpointing]
"""

import argparse

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--resume", action="store_true", help="stop after the checkpoint of step 2, and go on from it")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--gradient-checkpointing", action="store_true")
args = parser.parse_args()


class Counting(Dataset):
    """Sequences that count up."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(8) + index) % 32
        return {"input_ids": tokens, "labels": tokens}


class StopAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


def trainer(callbacks: list[TrainerCallback]) -> Trainer:
    set_seed(3)
    config = GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=2, n_head=2, attn_pdrop=0.0, embd_pdrop=0.0)
    config.resid_pdrop = 0.0
    options = TrainingArguments(
        output_dir=f"{args.folder}/out",
        use_cpu=True,
        max_steps=4,
        save_steps=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=args.accumulate,
        gradient_checkpointing=args.gradient_checkpointing,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    return Trainer(model=GPT2LMHeadModel(config), args=options, train_dataset=Counting(), callbacks=callbacks)


if args.resume:
    trainer([StopAfter(2)]).train()
run = trainer([])
run.train(resume_from_checkpoint=f"{args.folder}/out/checkpoint-2" if args.resume else None)
loss = run.evaluate(Counting())["eval_loss"]
wrapper = type(run.model_wrapped)
torch.save(
    {
        "weights": run.model.state_dict(),
        "loss": torch.tensor(loss),
        "class": f"{wrapper.__module__}.{wrapper.__qualname__}",
        "backend": torch.distributed.get_backend(),
    },
    f"{args.folder}/rank{run.args.process_index}.pt",
)
