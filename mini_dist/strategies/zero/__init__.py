"""ZeRO: shard what all data-parallel ranks would replicate, so that each rank holds 1/n.

    unit.py      parameters that are flattened, sharded, gathered, reduced and freed together
    stages.py    ZeRO1 shards optimizer states, ZeRO2 also gradients, ZeRO3 also parameters
    freed.py     parameters without memory: which of their attributes may be read
    offload.py   the optimizer's tensors, on the host or in files
    ideas.py     each stage's idea as one function, for lesson 07

Each stage changes the one before a little (Rajbhandari et al. 2020, section 5). All are used
in the same way:

    gpt = GPT(config)
    model = ZeRO2(gpt, group, lambda shards: AdamW(shards, lr=1e-3), units=gpt.blocks)
    for micro_batch in step:
        loss(model(micro_batch)).backward()
    model.step(max_norm=1.0)
    model.zero_grad()

Legend: n ranks, Ψ parameters, k micro-batches per step. Elements sent per rank and step, in
units of (n-1)/n Ψ:

    ZeRO1   2        scatter gradients, gather parameters: as much as an all-reduce
    ZeRO2   k + 1    scatter the gradients after every micro-batch
    ZeRO3   3k       gather for forward, gather for backward, scatter; the root, which stays
                     whole between the two, is gathered once: 2k for its part

For hosts with slow links between them (lesson 26): `replicas=` makes HSDP and MiCS of any stage,
`inside=` adds the second shards of ZeRO++ (hpZ) to ZeRO3, `messages=by_hosts` saves bytes between
hosts, and `messages=compression.Quantized(8, 4, by_hosts=True)` does so with codes.
"""

from .freed import FreedError
from .offload import Files
from .stages import ZeRO1, ZeRO2, ZeRO3
from .unit import Unit

__all__ = ["Files", "FreedError", "Unit", "ZeRO1", "ZeRO2", "ZeRO3"]
