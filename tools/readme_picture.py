"""Draw the README's picture from a run made now: docs/four_ranks.svg.

    python tools/readme_picture.py

Four ranks train lesson 00's GPT, and average their gradients by the ring that lesson 03 builds.
Above, what each of them did in the last steps; below, the loss and who sent how much to whom.
"""

from pathlib import Path

import torch

from mini_dist import GPT, ModelConfig, draw, launch
from mini_dist.collectives import ring_all_reduce
from mini_dist.course.draw.svg import WIDEST
from mini_dist.model.data import Batches, load_text
from mini_dist.model.loss import token_loss
from mini_dist.strategies.data_parallel import Bucketed

CONFIG = ModelConfig(d_model=64, num_layers=2, num_heads=4, seq_len=64, norm="rmsnorm")
TARGET = Path(__file__).resolve().parent.parent / "docs" / "four_ranks.svg"


def mean_by_ring(x, group):
    return ring_all_reduce(x, group) / group.size()


def train(text, steps, group):
    model = Bucketed(GPT(CONFIG), group, reduce=mean_by_ring)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = Batches(text, 32, CONFIG.seq_len, rank=group.rank(), size=group.size())
    losses = []
    for step in range(steps):
        inputs, targets = batches.batch(step)
        loss = token_loss(model(inputs), targets).mean()
        optimizer.zero_grad()
        loss.backward()
        model.finish()
        optimizer.step()
        losses.append(loss.item())
    return losses


def last_steps(ledger, steps):
    """Keep what happened since the beginning of the last `steps` steps."""
    forwards = [time for time, phase in ledger.phases[0] if phase == "forward"]
    began = forwards[-steps]
    ledger.comms = [comm for comm in ledger.comms if comm.start >= began]
    ledger.phases = [
        [(max(time, began), phase) for time, phase in changes if time >= began - 1e-3]
        for changes in ledger.phases
    ]
    ledger.span = [(began, end) for _, end in ledger.span]
    return ledger


def main():
    run = launch(train, 4, (load_text(), 60), timeout=300)
    mean_losses = [sum(values) / 4 for values in zip(*run.results)]
    parts = [
        draw.timeline(last_steps(run.ledger, 3)),
        draw.curve({"4 ranks": mean_losses}, "step", "loss"),
        draw.traffic(run.ledger),
    ]
    parts[1].panels[0].width = WIDEST - parts[2].panels[0].width  # one next to the other
    alt = "; ".join(part.alt for part in parts)
    draw.Drawing([panel for part in parts for panel in part.panels], alt).save(TARGET)
    print(f"{TARGET.name}: {TARGET.stat().st_size // 1024} kB")


if __name__ == "__main__":
    main()
