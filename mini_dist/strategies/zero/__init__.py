"""ZeRO: what all data-parallel ranks hold alike is cut, so that each holds one n-th.

    unit.py      parameters that are flattened, cut, gathered, reduced and freed together
    stages.py    ZeRO1 cuts optimizer states, ZeRO2 gradients, too, ZeRO3 parameters, too
    freed.py     parameters without memory: what may be asked of them
    offload.py   what the optimizer holds, on the host or in files
    ideas.py     each stage's idea as one function, for lesson 07

Each stage is the one before with a small change (Rajbhandari et al. 2020, section 5). All are used
alike:

    gpt = GPT(config)
    model = ZeRO2(gpt, group, lambda shards: AdamW(shards, lr=1e-3), units=gpt.blocks)
    for micro_batch in step:
        loss(model(micro_batch)).backward()
    model.step(max_norm=1.0)
    model.zero_grad()

Legend: n ranks, Ψ parameters, k micro-batches in a step. Elements sent by a rank in a step, in
units of (n-1)/n Ψ:

    ZeRO1   2        scatter gradients, gather parameters: what an all-reduce sends
    ZeRO2   k + 1    the gradients after every micro-batch
    ZeRO3   3k       gather for forward, gather for backward, scatter; the root, which stays from
                     the one to the other, is gathered once: 2k for its part

On hosts with slow links between them (lesson 26): `replicas=` makes HSDP and MiCS of any stage,
`inside=` adds the second shards of ZeRO++ (hpZ) to ZeRO3, `messages=by_hosts` cares for the rest,
and `messages=compression.Quantized(8, 4, by_hosts=True)` does so in codes.
"""

from .freed import FreedError
from .offload import Files
from .stages import ZeRO1, ZeRO2, ZeRO3
from .unit import Unit

__all__ = ["Files", "FreedError", "Unit", "ZeRO1", "ZeRO2", "ZeRO3"]
