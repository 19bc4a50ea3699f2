"""Lesson 25: one has stepped, the others have not, and a rank is gone."""

from board import BACKWARD, FORWARD, GRAY, INK, RANKS, WRONG, Board


def one_has_stepped():
    board = Board(
        760,
        290,
        "Four ranks over time in step 7. Rank 3 dies when the sum of the gradients has reached "
        "rank 0, but not ranks 1 and 2. Rank 0 has stepped and holds the parameters after step 7. "
        "Ranks 1 and 2 still hold the parameters after step 6.",
    )
    for rank in range(4):
        y = 40 + 60 * rank
        board.words(15, y, f"rank {rank}", 13, GRAY, "start")
        board.box(80, y - 18, 110, 36, "after step 6", RANKS[0])
        board.box(195, y - 18, 150, 36, "gradients of step 7", FORWARD)
        if rank == 0:
            board.box(350, y - 18, 110, 36, "sum is here", BACKWARD)
            board.box(465, y - 18, 130, 36, "after step 7", RANKS[1])
        elif rank < 3:
            board.words(360, y, "waits for the sum ...", 13, GRAY, "start")
            board.words(620, y, "still after step 6", 13, WRONG, "start")
        else:
            board.words(360, y, "dies", 14, WRONG, "start")
    board.words(620, 40, "one step ahead", 13, INK, "start")
    return board
