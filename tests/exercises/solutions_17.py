"""Lesson 17, solved as a learner would."""

from mini_dist.config import Layout


def layout_for_70b():
    return Layout(
        dp=128, tp=4, sequence_parallel=True, zero=3, micro_batch_size=1, num_micro_batches=4
    )
