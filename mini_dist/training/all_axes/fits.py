"""Layouts that cannot work although each strategy alone would: an error, with what would work."""

from __future__ import annotations

from mini_dist.plan.config import Layout, ModelConfig
from mini_dist.strategies.precision import Precision


def check_fits(config: ModelConfig, layout: Layout, group, precision: Precision) -> None:
    """Raise ValueError for conflicts that no single strategy can detect."""
    layout.check(config)
    if layout.world_size != group.size():
        raise ValueError(
            f"pp*dp*cp*tp = {layout.world_size}, but the group has {group.size()} ranks: "
            f"{nearest(layout, group.size())}"
        )
    splits = layout.schedule.startswith(("zb_", "dualpipe"))
    if layout.pp > 1 and splits and layout.zero >= 2:
        raise ValueError(
            f"zero={layout.zero} scatters gradients when autograd has them, but {layout.schedule} "
            "computes those of weights later by itself: take zero=1, or schedule='1f1b'"
        )
    if layout.pp > 1 and splits and precision.dtype is not None:
        raise ValueError(
            f"{layout.schedule} multiplies weight gradients in the parameters' dtype, not in "
            f"{precision.dtype}: take schedule='1f1b', or full precision"
        )
    if layout.pp > 1 and config.tied_embedding and layout.zero >= 2:
        raise ValueError(
            f"zero={layout.zero} gives a gradient away before the other end of a tied embedding "
            "has added its part: take zero=1, or tied_embedding=False"
        )
    if config.dropout and layout.cp > 1:
        raise ValueError(
            f"dropout={config.dropout} in attention needs the whole row of scores, which cp="
            f"{layout.cp} never has: take dropout=0, or cp=1"
        )


def nearest(layout: Layout, ranks: int) -> str:
    """Suggest a size of dp, if any would fit."""
    others = layout.world_size // layout.dp
    if ranks % others == 0:
        return f"dp={ranks // others} would fit"
    return f"the axes other than dp multiply to {others}, which must divide the number of ranks"
