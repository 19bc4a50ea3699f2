"""Lesson 28: one function on real ranks and on simulated ones."""

from board import DARK, FORWARD, GRAY, INK, MESSAGE, RANKS, Board


def one_function_two_worlds():
    board = Board(
        760,
        300,
        "One function, two worlds. Above: launch(train, 4) runs it on four ranks with real "
        "tensors, the ledger records kernels and messages, and the clock tells the time. Below: "
        'launch(train, 1024, simulate="h100") runs one rank of each kind on tensors without '
        "storage, records the same events, and plays all 1,024 ranks in virtual time, with kernels "
        "timed by a roofline and messages by the links.",
    )
    board.box(20, 115, 120, 70, "train(group)\nyour function", FORWARD, 14)
    for row, (y, title) in enumerate(
        ((20, "launch(train, 4)"), (180, 'launch(train, 1024, simulate="h100")'))
    ):
        board.words(180, y + 8, title, 14, INK, "start", bold=True)
        board.arrow(140, 135 + 30 * row, 178, y + 62, color=GRAY)
    for number in range(4):
        board.box(180 + 45 * number, 50, 40, 70, f"rank\n{number}", RANKS[number], 12)
    board.words(268, 136, "real tensors", 12, GRAY)
    board.box(180, 205, 40, 70, "rank\n0", RANKS[0], 12, dashed=True)
    board.words(268, 232, "stands for", 12, GRAY)
    board.words(268, 248, "all 1,024", 12, GRAY)
    board.words(250, 290, "shapes, no storage", 12, GRAY)
    board.box(415, 90, 130, 70, "ledger: kernels,\nmessages, bytes", MESSAGE, 13)
    board.arrow(362, 85, 413, 115, color=GRAY)
    board.line(330, 240, 510, 240, color=GRAY)
    board.arrow(510, 240, 510, 162, color=GRAY)
    board.box(600, 50, 140, 70, "the clock\nof this machine", size=13)
    board.box(600, 205, 140, 70, "virtual time:\nroofline, links", size=13)
    board.arrow(547, 110, 598, 90, color=DARK[MESSAGE])
    board.arrow(547, 145, 598, 230, color=DARK[MESSAGE])
    return board
