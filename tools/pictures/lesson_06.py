"""Lesson 06: what is in memory, moment by moment, with and without recomputation."""

from board import BACKWARD, FORWARD, GRAY, PAPER, Board

WHOLE, INPUT = "#9e9ac8", "#dadaeb"


def forget_and_repeat():
    board = Board(
        860,
        250,
        "Four blocks, moment by moment. Keeping all: forward fills the memory block by block, "
        "backward empties it. Recomputing: each block leaves only its input, and its forward runs "
        "once more just before its backward, so at most one block is there in full.",
    )
    keeping = [("F", block) for block in range(4)] + [("B", block) for block in (3, 2, 1, 0)]
    repeating = [("F", block) for block in range(4)]
    for block in (3, 2, 1, 0):
        repeating += [("F", block), ("B", block)]
    for left, words, moments in ((90, "keep all", keeping), (400, "recompute", repeating)):
        board.words(left + 15 * len(moments), 18, words, 14, bold=True)
        kept, inputs = set(), set()
        for number, (kind, block) in enumerate(moments):
            x, recomputes = left + 30 * number, len(moments) > 8
            first = number < 4
            if kind == "F":
                (inputs if recomputes else kept).add(block)
                if recomputes and not first:
                    kept.add(block)
            board.box(x, 40, 26, 26, f"{kind}{block + 1}", FORWARD if kind == "F" else BACKWARD, 11)
            for row in range(4):
                y = 82 + 30 * (3 - row)
                board.box(x, y, 26, 26, "", PAPER, line="#d9d9d9")
                if row in kept:
                    board.box(x, y, 26, 26, "", WHOLE)
                elif row in inputs or (recomputes and first and row == block):
                    board.box(x, y + 21, 26, 5, "", INPUT)
            if kind == "B":
                kept.discard(block)
                inputs.discard(block)
    for row in range(4):
        board.words(82, 95 + 30 * (3 - row), f"block {row + 1}", 12, GRAY, "end")
    board.words(82, 53, "runs", 12, GRAY, "end")
    board.box(250, 220, 20, 16, "", WHOLE)
    board.words(276, 228, "all that the block keeps", 12, anchor="start")
    board.box(480, 231, 20, 5, "", INPUT)
    board.words(506, 228, "its input alone", 12, anchor="start")
    return board
