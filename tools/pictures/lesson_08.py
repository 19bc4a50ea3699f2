"""Lesson 08: a unit cut as one flat tensor, and parameter by parameter."""

from board import GRAY, RANKS, Board

PARAMETERS = (("weight 1", 288), ("bias", 64), ("weight 2", 240))  # widths in pixels


def flat_or_each():
    board = Board(
        760,
        270,
        "A unit of a weight, a bias and another weight, cut for four ranks. Flat: one tensor, "
        "whose quarters begin and end inside parameters. FSDP2: every parameter cut by itself.",
    )
    board.words(90, 75, "flat", 14, bold=True, anchor="end")
    board.words(90, 180, "FSDP2", 14, bold=True, anchor="end")
    total = sum(width for _, width in PARAMETERS)
    for rank, color in enumerate(RANKS[:4]):
        board.box(110 + total / 4 * rank, 55, total / 4, 40, str(rank), color, line="#ffffff")
        board.box(190 + 120 * rank, 234, 18, 18, str(rank), color)
        board.words(214 + 120 * rank, 243, f"rank {rank}", 13, GRAY, "start")
    left, apart = 110, 110
    for words, width in PARAMETERS:
        board.box(left, 55, width, 40, "", "none")
        board.words(left + width / 2, 38, words, 13, GRAY)
        board.words(apart + width / 2, 138, words, 13, GRAY)
        for rank, color in enumerate(RANKS[:4]):
            board.box(
                apart + width / 4 * rank, 155, width / 4, 50, str(rank), color, line="#ffffff"
            )
        board.box(apart, 155, width, 50, "", "none")
        left, apart = left + width, apart + width + 16
    return board
