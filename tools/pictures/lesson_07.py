"""Lesson 07: which quarter of what each rank holds, and what offload moves."""

from board import GRAY, PAPER, RANKS, Board


def who_holds_what():
    board = Board(
        860,
        330,
        "Four panels with four ranks each. Data parallel: every rank holds all quarters of "
        "parameters, gradients and optimizer state. ZeRO-1 cuts the optimizer state, ZeRO-2 the "
        "gradients as well, ZeRO-3 everything: a rank keeps its own quarter.",
    )
    kinds = (("parameters", 40, 52), ("gradients", 102, 52), ("optimizer\nstate", 164, 104))
    for words, y, height in kinds:
        lines = words.split("\n")
        for number, line in enumerate(lines):
            below = 15 * (number - (len(lines) - 1) / 2)
            board.words(84, y + height / 2 + below, line, 13, GRAY, "end")
    for stage, name in enumerate(("data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3")):
        left = 100 + 192 * stage
        board.words(left + 82, 18, name, 14, bold=True)
        for rank in range(4):
            x = left + 42 * rank
            for kind, (_, y, height) in enumerate(kinds):
                cut = stage >= 3 - kind
                for quarter, color in enumerate(RANKS[:4]):
                    held = quarter == rank or not cut
                    top, part = y + height / 4 * quarter, height / 4
                    if held:
                        board.box(x, top, 36, part, "", color)
                    else:
                        board.box(x, top, 36, part, "", PAPER, dashed=True, line="#d0d0d0")
            board.words(x + 18, 286, f"{rank}", 12, GRAY)
        board.words(left + 82, 308, "rank", 12, GRAY)
    return board


def offload():
    board = Board(
        800,
        190,
        "Device, host and files. Per parameter of the shard and step: 4 bytes of gradient to the "
        "host, 4 bytes of new parameter back; the shard and Adam's two moments, 12 bytes, are read "
        "from files and written again.",
    )
    board.box(20, 40, 170, 110, "device\n\nparameters,\nshards of gradients", RANKS[0])
    board.box(320, 40, 150, 110, "host\n\nsteps one unit\nafter the other", RANKS[2])
    board.box(610, 40, 170, 110, "files\n\nshard and Adam's\ntwo moments", RANKS[6])
    board.arrow(190, 72, 318, 72, "gradient: 4")
    board.arrow(320, 118, 192, 118, "new value: 4")
    board.arrow(610, 72, 472, 72, "read: 4 + 8 + 4")
    board.arrow(470, 118, 608, 118, "write: 4 + 8")
    board.words(400, 176, "bytes per parameter of the shard and step, in float32", 13, GRAY)
    return board
