"""Lesson 01: what one parameter needs while it is trained."""

from board import BACKWARD, FORWARD, GRAY, RANKS, Board


def sixteen_bytes():
    board = Board(
        776,
        160,
        "Sixteen bytes that one parameter needs while it is trained: 2 parameter, 2 gradient, "
        "4 fp32 copy, 4 first moment, 4 second moment. Forward and backward touch the first four, "
        "the other twelve only the optimizer.",
    )
    parts = (
        (2, "parameter", "2 bytes, bf16", FORWARD),
        (2, "gradient", "2 bytes, bf16", BACKWARD),
        (4, "fp32 copy", "4 bytes, of the parameter", RANKS[2]),
        (4, "1st moment", "4 bytes, mean of gradients", RANKS[6]),
        (4, "2nd moment", "4 bytes, mean of squares", RANKS[3]),
    )
    left, byte = 20, 46
    for number, name, about, color in parts:
        for k in range(number):
            board.box(left + byte * k, 42, 43, 40, fill=color)
        middle = left + byte * number / 2 - 1.5
        board.words(middle, 26, name, 14)
        board.words(middle, 98, about, 11, GRAY)
        left += byte * number
    for start, end, words in (
        (20, 201, "what forward and backward touch: 4"),
        (204, 753, "what only the optimizer touches: 12"),
    ):
        for x in (start, end):
            board.line(x, 112, x, 120, GRAY)
        board.line(start, 120, end, 120, GRAY)
        board.words(max((start + end) / 2, 125), 138, words, 12)
    return board
