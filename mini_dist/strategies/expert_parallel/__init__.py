"""Expert parallelism: each rank holds some of the experts, and tokens travel to their experts.

A layer with experts has far more weights than a token uses. Every rank routes its own tokens
(`route` of routing.py), sends a copy of each to the ranks of its chosen experts, and receives
the answers: two all-to-alls, called dispatch and combine, and two more in backward.

    ideas.py      choose_copies, dispatch, combine, balance_loss
    layer.py      the layer with its experts distributed; `shard_experts` puts it into a GPT
    balance.py    how busy experts were; a loss that a layer deep in a pipeline adds

    shard_experts(model, mesh["ep"], balance_group=mesh["dp", "cp"], balance_loss=0.01)
"""

from .balance import AttachLoss, Load
from .ideas import (
    Copies,
    Dispatched,
    balance_loss,
    capacity_of,
    choose_copies,
    combine,
    dispatch,
)
from .layer import (
    ExpertParallel,
    layers_with_experts,
    move_balance_biases,
    set_loss_scale,
    shard_experts,
    visits_of_whole_steps,
)

__all__ = [
    "AttachLoss",
    "Copies",
    "Dispatched",
    "ExpertParallel",
    "Load",
    "balance_loss",
    "capacity_of",
    "choose_copies",
    "combine",
    "dispatch",
    "layers_with_experts",
    "move_balance_biases",
    "set_loss_scale",
    "shard_experts",
    "visits_of_whole_steps",
]
