"""Lesson 13: a backward in one piece, and taken apart."""

from board import BACKWARD, GRAY, Board

W_COLOR = "#c7e9c0"


def nobody_waits_for_w():
    board = Board(
        760,
        370,
        "A chain of three ranks. In one piece, each rank sends dx only when its whole backward is "
        "done, so the chain takes six units. Taken apart, it sends dx after B, the next rank "
        "starts at once, and the chain takes four; no arrow leaves a W.",
    )
    unit, left = 90, 110
    for top, heading, split in ((30, "in one piece", False), (190, "taken apart", True)):
        board.words(left, top, heading, 13, GRAY, "start", bold=True)
        for place, rank in enumerate((2, 1, 0)):
            y, x = top + 16 + 46 * place, left + unit * place * (1 if split else 2)
            board.words(20, y + 13, f"rank {rank}", 13, anchor="start")
            board.box(x, y, unit, 26, "B: dx", BACKWARD)
            board.box(x + unit, y, unit, 26, "W: dW", W_COLOR)
            sent = x + unit * (1 if split else 2)
            if rank:
                board.arrow(sent, y + 26, sent, y + 45, color=BACKWARD, width=2)
                board.words(sent - 8, y + 37, "dx", 12, BACKWARD, "end")
    for units in range(7):
        x = left + unit * units
        board.line(x, 340, x, 346)
        board.words(x, 355, str(units), 12, GRAY)
    board.line(left, 340, left + 6 * unit, 340)
    return board
