"""Lesson 03: partial sums that walk round a ring, as in the table that the learner fills in."""

from board import GRAY, PAPER, RANKS, Board

START = [[1, 2, 3], [10, 20, 30], [100, 200, 300]]  # [rank][chunk]
CELL, HEIGHT = 40, 34
PLACES = [(90, 62), (180, 190), (0, 190)]  # of each rank's chunks, in a panel
ARROWS = [((186, 102), (232, 184)), ((176, 207), (124, 207)), ((68, 184), (114, 102))]
VALUES = [(236, 138), (150, 178), (64, 138)]  # where an arrow's number stands


def three_sums_in_a_ring():
    board = Board(
        946,
        260,
        "Reduce-scatter by a ring of three ranks, with the numbers of the table: in each round "
        "every rank sends one partial sum to the rank after it; in the end each has one chunk of "
        "the whole sum.",
    )
    held = [list(row) for row in START]
    for number, title in enumerate(("round 1", "round 2", "in the end")):
        left = 3 + 320 * number
        board.words(left + 150, 14, title, 14, GRAY, bold=True)
        chosen = [(rank - 1 - number) % 3 for rank in range(3)]  # the chunk that a rank sends
        for rank, (x, y) in enumerate(PLACES):
            board.words(left + x + 60, y - 14 if rank == 0 else y + 48, f"rank {rank}", 12, GRAY)
            for chunk, value in enumerate(held[rank]):
                fill = RANKS[chunk] if chunk == chosen[rank] else PAPER
                board.box(left + x + chunk * CELL, y, CELL, HEIGHT, str(value), fill)
        if number == 2:
            return board
        moving = [held[rank][chosen[rank]] for rank in range(3)]
        for rank, ((x1, y1), (x2, y2)) in enumerate(ARROWS):
            board.arrow(left + x1, y1, left + x2, y2, color=GRAY, width=2.2)
            x, y, color = left + VALUES[rank][0], VALUES[rank][1], RANKS[chosen[rank]]
            board.box(x - 18, y - 11, 36, 22, str(moving[rank]), color, line=color)
            held[(rank + 1) % 3][chosen[rank]] += moving[rank]
