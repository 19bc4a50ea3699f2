"""Lesson 10: what two ranks hold outside and inside a region, with TP and with SP."""

from board import GRAY, MESSAGE, PAPER, RANKS, Board

SIDE = 64


def tokens_or_features():
    board = Board(
        860,
        420,
        "A tensor of tokens times features on two ranks. TP: outside the regions both hold all of "
        "it, inside each has all tokens for half of the features. SP: outside each holds half of "
        "the tokens; all-gather and reduce-scatter lead inside and out.",
    )
    lefts = (140, 430, 720)
    between = "norm, dropout, residual"
    for left, words in zip(lefts, (between, "attention or MLP", between)):
        board.words(left + SIDE / 2, 20, words, 13, GRAY)
    for case, (name, enter, leave) in enumerate(
        (("TP", "copy: nothing sent", "all-reduce"), ("SP", "all-gather", "reduce-scatter"))
    ):
        top = 45 + 195 * case
        board.words(30, top + 72, name, 16, bold=True)
        for rank, color in enumerate(RANKS[:2]):
            y = top + 80 * rank
            board.words(125, y + SIDE / 2, f"rank {rank}", 12, GRAY, "end")
            for left in lefts:
                inside = left == lefts[1]
                board.box(left, y, SIDE, SIDE, "", PAPER, dashed=True)
                if inside:
                    board.box(left + SIDE / 2 * rank, y, SIDE / 2, SIDE, "", color)
                elif name == "SP":
                    board.box(left, y + SIDE / 2 * rank, SIDE, SIDE / 2, "", color)
                else:
                    board.box(left, y, SIDE, SIDE, "", "#e0e0e0")
            for left, words in ((lefts[0], enter), (lefts[1], leave)):
                board.arrow(left + SIDE + 8, y + 32, left + 282, y + 32, words, color=MESSAGE)
    board.words(
        430, 405, "a square: tokens from top to bottom, features from left to right", 13, GRAY
    )
    return board
