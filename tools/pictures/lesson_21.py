"""Lesson 21: two ranks in a step, and the parts that one of them adds up to."""

from board import FORWARD, GRAY, PAPER, Board

DATA, WAIT, SEND, HOST = "#fee391", "#fcbba1", "#bcbddc", "#d9d9d9"


def where_a_step_goes():
    board = Board(
        860,
        250,
        "Two ranks on one timeline. Rank 0 loads data, computes, and enters the all-reduce; it "
        "waits until rank 1, which computes longer, enters as well; then both communicate, and "
        "both end with host time. Below, a bar with the parts of rank 0's step in a row: data, "
        "waiting, communication, compute, host, and at the end a small dashed gap called "
        "unexplained.",
    )
    rows = [
        ("rank 0", [(60, "data", DATA), (250, "compute", FORWARD), (150, "waiting", WAIT)]),
        ("rank 1", [(60, "data", DATA), (400, "compute", FORWARD)]),
    ]
    for number, (name, parts) in enumerate(rows):
        y, x = 30 + 56 * number, 90
        board.words(20, y + 18, name, 14, anchor="start", bold=True)
        for width, words, color in parts:
            board.box(x, y, width, 36, words, color)
            x += width
        board.box(x, y, 120, 36, "communication", SEND, 12)
        board.box(x + 120, y, 90, 36, "host", HOST)
    board.line(550, 14, 550, 132, dashed=True)
    board.words(556, 14, "the last rank has entered", 12, GRAY, "start")
    board.words(90, 160, "the step of rank 0, its parts added up", 13, anchor="start")
    x = 90
    for width, words, color in [
        (60, "data", DATA),
        (150, "waiting", WAIT),
        (120, "communication", SEND),
        (250, "compute", FORWARD),
        (90, "host", HOST),
    ]:
        board.box(x, 176, width, 36, words, color, 12)
        x += width
    board.box(x, 176, 16, 36, "", PAPER, dashed=True)
    board.words(x + 8, 228, "unexplained", 12, GRAY)
    return board
