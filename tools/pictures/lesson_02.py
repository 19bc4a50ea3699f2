"""Lesson 02: what naive data parallelism is, on one board."""

from board import BACKWARD, FORWARD, GRAY, MESSAGE, RANKS, Board


def one_batch_four_ranks():
    board = Board(
        760,
        330,
        "Each of four ranks has the whole model and a quarter of the batch. Their gradients "
        "differ; after they are averaged all ranks take the same step, so the models stay equal.",
    )
    heads = ("a quarter of the batch", "the whole model", "its own gradients", "the mean, the same")
    for x, words in zip((95, 285, 475, 685), heads):
        board.words(x, 22, words, 13, GRAY)
    board.box(562, 150, 56, 46, "mean", line=MESSAGE)
    for rank, color in enumerate(RANKS[:4]):
        y = 45 + 70 * rank
        board.box(20, y, 150, 46, f"rank {rank}: rows {2 * rank}, {2 * rank + 1}", color)
        board.box(230, y, 110, 46, "weights w", "white")
        board.box(420, y, 110, 46, f"gradient g{rank}", color)
        board.box(640, y, 110, 46, "w - lr * mean", "white")
        board.arrow(170, y + 16, 228, y + 16, color=FORWARD)
        board.arrow(340, y + 16, 418, y + 16, color=BACKWARD)
        board.arrow(530, y + 23, 560, 173 + 9 * (rank - 1.5), color=MESSAGE)
        board.arrow(618, 173 + 9 * (rank - 1.5), 638, y + 23, color=MESSAGE)
    return board
