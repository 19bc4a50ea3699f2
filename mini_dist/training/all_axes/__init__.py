"""All axes together (lesson 15): one model on a grid of ranks, sharded in every way of the course.

    layout = Layout(pp=2, dp=2, tp=2, sequence_parallel=True, zero=1, num_micro_batches=4)
    model = parallelize(config, layout, group, lambda tensors: AdamW(tensors, lr=1e-3))
    for step in range(steps):
        inputs, targets = batches.batch(step)        # [B/dp, S], the same on all ranks of a replica
        done = model.step(inputs, targets, max_norm=1.0)

Read in this order:
    ideas.py           parallelize: applies all strategies
    parallel_model.py  its result: one optimizer step of the whole model
    averaging.py       which gradients are averaged, and over which ranks
    experts_cut.py     experts whose matrices are sharded by etp
    norm.py            one gradient norm that counts each element once
    fits.py            layouts that cannot work, and the nearest that do

Sources: PTD-P (Narayanan et al. 2021), Megatron-core's five axes, Llama 3 (Grattafiori et al. 2024,
section 3.3). Legend: B batch, S sequence, D model; a replica is the pp*cp*tp ranks that hold one
copy of the model and get the same part of the batch.
"""

from .ideas import parallelize
from .parallel_model import ParallelModel

__all__ = ["ParallelModel", "parallelize"]
