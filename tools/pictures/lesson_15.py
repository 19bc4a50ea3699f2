"""Lesson 15: with whom one rank of a grid talks, and how often."""

from board import BACKWARD, FORWARD, GRAY, INK, MESSAGE, PAPER, RANKS, Board


def with_whom_rank_5_talks():
    board = Board(
        760,
        330,
        "16 ranks in a grid of pp 4, dp 2 and tp 2, on two nodes. Rank 5 talks with rank 4 over "
        "tp, in every layer; with ranks 1 and 9 over pp, in every micro-batch; with rank 7 over "
        "dp, once a step. Only what goes to rank 9 crosses to the other node.",
    )
    for node in range(2):
        board.box(130 + 310 * node, 36, 290, 260, "", "none", dashed=True, line=GRAY)
        board.words(275 + 310 * node, 312, f"node {node}", 13, GRAY)
    for row in range(4):
        dp, tp = divmod(row, 2)
        board.words(20, 68 + 62 * row, f"dp {dp}, tp {tp}", 13, GRAY, "start")
        for pp in range(4):
            rank = (pp * 2 + dp) * 2 + tp
            fill = RANKS[1] if rank == 5 else RANKS[0] if rank in (1, 4, 7, 9) else PAPER
            board.box(145 + 155 * pp, 50 + 62 * row, 70, 36, f"rank {rank}", fill)
    for pp in range(4):
        board.words(180 + 155 * pp, 18, f"pp {pp}", 13, GRAY)
    board.arrow(335, 112, 335, 88, color=INK, width=4)
    board.words(326, 98, "tp: every layer", 12, INK, "end")
    board.arrow(300, 130, 217, 130, color=BACKWARD, width=2.4)
    board.arrow(370, 130, 453, 130, color=FORWARD, width=2.4)
    board.words(258, 143, "pp: every", 12)
    board.words(258, 158, "micro-batch", 12)
    board.arrow(356, 148, 356, 234, color=MESSAGE, width=2.4, bend=24)
    board.words(292, 192, "dp: once", 12, MESSAGE, "end")
    board.words(292, 208, "a step", 12, MESSAGE, "end")
    return board
