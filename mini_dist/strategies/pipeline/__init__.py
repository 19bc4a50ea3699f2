"""Pipeline parallelism (lessons 12 and 13): cut the model into stages and run a schedule.

    def train(group):
        schedule = one_f_one_b(group.size(), num_micro_batches=8)
        stages = cut_gpt(config, schedule.stages_of[group.rank()], schedule.num_stages)
        pipeline = Pipeline(schedule, stages, group, loss_fn=loss, activation=activation)
        return pipeline.step(tokens, targets)       # gradients are in the parameters' .grad

Read in this order:
    ideas.py            GPipe in one function; any list of actions in another
    cut.py              which layers go where
    execute.py          the executor for real models: runs the list and routes its inputs
    stage.py            one stage with autograd: forward now, backward later
    messages.py         sends and receives in flight
    losses.py           the last stage's rank sends the losses to all
    split_backward.py   the backward of linears in two halves (lesson 13)
    weight_versions.py  the weights at several optimizer steps (lesson 13)
    plan.py             what the executor looks up, computed once per list
    fits.py             whether schedule, stages, group and batch fit together
    emulated.py         the same executor, on devices that take a given time
"""

from .cut import (
    GPTStage,
    balanced_ranges,
    cut_gpt,
    layer_costs,
    layer_ranges,
    shared_parameter,
    tie_ends,
)
from .emulated import run_emulated
from .execute import Pipeline
from .ideas import gpipe_step, run_list
from .stage import Stage

__all__ = [
    "GPTStage",
    "Pipeline",
    "Stage",
    "balanced_ranges",
    "cut_gpt",
    "gpipe_step",
    "layer_costs",
    "layer_ranges",
    "run_emulated",
    "run_list",
    "shared_parameter",
    "tie_ends",
]
