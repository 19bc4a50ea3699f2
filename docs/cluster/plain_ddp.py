"""Train with data parallelism without `launch`: torchrun starts the ranks, and DDP averages.

    torchrun --standalone --nproc-per-node 2 docs/cluster/plain_ddp.py

Only the model, its loss and the text come from the course. `--forget-set-epoch` leaves out a line
that is often forgotten, and then every epoch processes the samples in the same order.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from mini_dist import GPT, ModelConfig, load_text, token_loss

CONFIG = ModelConfig(d_model=64, num_layers=2, num_heads=4, seq_len=32)


def numbered_samples(count):
    """The first `count` samples of the text with their numbers, the same on every rank."""
    length = CONFIG.seq_len + 1  # one more than the model sees: the last one is only a target
    rows = load_text()[: count * length].long().view(count, length)
    return TensorDataset(torch.arange(count), rows)


def train(options):
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    samples = numbered_samples(options.samples)
    sampler = DistributedSampler(samples, shuffle=True, seed=0)  # rank and size from the group
    loader = DataLoader(samples, batch_size=options.batch, sampler=sampler)
    model = DistributedDataParallel(GPT(CONFIG, seed=0).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(options.epochs):
        if not options.forget_set_epoch:
            sampler.set_epoch(epoch)  # else the shuffle of epoch 0 comes again
        for step, (numbers, rows) in enumerate(loader):
            rows = rows.to(device)
            loss = token_loss(model(rows[:, :-1]), rows[:, 1:]).mean()
            loss.backward()  # and here, meanwhile, gradients are averaged
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach() / dist.get_world_size()
            dist.all_reduce(mean)  # of all ranks: each has seen its own samples
            if dist.get_rank() == 0:
                order = " ".join(map(str, numbers.tolist()))
                print(f"epoch {epoch} step {step}: loss {mean:.4f}, samples {order}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=48, help="of the text")
    parser.add_argument("--batch", type=int, default=6, help="samples of a rank in a step")
    parser.add_argument("--forget-set-epoch", action="store_true")
    options = parser.parse_args()
    # torchrun has set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which this reads.
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        train(options)
    finally:
        dist.destroy_process_group()
