"""Lesson 09: column, then row, with one all-reduce each way."""

from board import BACKWARD, FORWARD, GRAY, PAPER, RANKS, Board


def column_then_row():
    board = Board(
        860,
        330,
        "Two ranks compute one MLP on the same x. Each has half of W1's columns and half of W2's "
        "rows, makes half of the hidden features and a summand of the result. One all-reduce adds "
        "the summands; on the way back another adds the gradients of x.",
    )
    heads = ((65, "x, alike"), (235, "W1 by columns"), (375, "hidden"), (525, "W2 by rows"))
    for x, words in (*heads, (660, "a summand"), (800, "y, alike")):
        board.words(x, 20, words, 13, GRAY)
    for rank, color in enumerate(RANKS[:2]):
        y = 45 + 140 * rank
        board.words(14, y + 35, f"rank {rank}", 12, GRAY, "start")
        board.box(62, y, 46, 70, "x")
        for half in range(2):  # the columns of W1, the rows of W2: this rank has one half
            mine = half == rank
            board.box(195 + 40 * half, y, 40, 70, "", color if mine else PAPER, dashed=not mine)
            board.box(490, y + 35 * half, 70, 35, "", color if mine else PAPER, dashed=not mine)
        board.box(345, y, 60, 70, "GELU", color)
        board.box(625, y, 70, 70, f"y{rank}", color)
        board.box(780, y, 46, 70, "y")
        for left, right in ((108, 193), (275, 343), (405, 488), (560, 623), (727, 778)):
            board.arrow(left, y + 25, right, y + 25, color=FORWARD)
            board.arrow(right, y + 48, left + 2, y + 48, color=BACKWARD)
        board.arrow(695, y + 25, 708, y + 25, color=FORWARD, width=1)
        board.arrow(708, y + 48, 697, y + 48, color=BACKWARD, width=1)
    board.box(709, 40, 16, 220, "", FORWARD)
    board.words(717, 282, "all-reduce forward", 13)
    board.words(717, 302, "nothing backward", 13, GRAY)
    board.box(140, 40, 16, 220, "", BACKWARD)
    board.words(148, 282, "nothing forward", 13, GRAY)
    board.words(148, 302, "all-reduce backward", 13)
    board.words(432, 282, "nothing is sent in between", 13, GRAY)
    return board
