"""Pipeline parallelism (lessons 12 and 13): cut the model into stages and run a schedule.

    def train(group):
        schedule = one_f_one_b(group.size(), num_micro_batches=8)
        stages = cut_gpt(config, schedule.stages_of[group.rank()], schedule.num_stages)
        pipeline = Pipeline(schedule, stages, group, loss_fn=loss, activation=activation)
        return pipeline.step(tokens, targets)       # gradients are in the parameters' .grad

Read in this order:
    execute.py  down the list: who gets what from whom
    stage.py    forward now, backward later; the backward in two halves; weight versions
    cut.py      which layers go where
    emulated.py the same executor, on devices that take a stated time
"""

from mini_dist.pipeline.cut import (
    GPTStage,
    balanced_ranges,
    cut_gpt,
    layer_costs,
    layer_ranges,
    shared_parameter,
)
from mini_dist.pipeline.emulated import run_emulated
from mini_dist.pipeline.execute import Pipeline
from mini_dist.pipeline.stage import Stage

__all__ = [
    "GPTStage",
    "Pipeline",
    "Stage",
    "balanced_ranges",
    "cut_gpt",
    "layer_costs",
    "layer_ranges",
    "run_emulated",
    "shared_parameter",
]
