"""Lesson 16: what a failure costs; what four ranks have saved, three others load."""

from board import FORWARD, GRAY, INK, RANKS, WRONG, Board


def what_a_failure_costs():
    board = Board(
        625,
        170,
        "A line of time. Training runs for tau seconds, then a save stops it for delta seconds, "
        "and so on. A failure strikes in the middle of the third interval. The work since the last "
        "save, tau / 2 on average, is lost, and the run goes on from that save.",
    )
    left, work, save = 25, 170, 32
    for number in range(3):
        x = left + (work + save) * number
        if number < 2:
            board.box(x, 60, work, 40, "train", FORWARD)
            board.box(x + work, 60, save, 40, "save", RANKS[5], 11)
    failure = x + work / 2
    board.box(x, 60, work, 40, dashed=True)
    board.box(x, 60, work / 2, 40, "lost", RANKS[4])
    board.line(failure, 48, failure, 112, WRONG, 3)
    board.words(failure, 36, "failure", 13, WRONG, bold=True)
    board.words(left + work / 2, 125, "τ: every interval", 13, GRAY)
    board.words(left + work + save / 2, 45, "δ: every save", 13, GRAY)
    board.words(x + work / 4, 125, "τ / 2 on average", 13, GRAY)
    board.arrow(failure, 140, x, 140, color=INK)
    board.words(x + work / 4, 157, "start again from the save", 13, INK)
    return board


def four_write_three_read():
    board = Board(
        760,
        255,
        "A flat tensor of 12 elements, saved in four equal parts by four ranks and loaded in three "
        "by others. Rank 0 of three reads all of the first file and the beginning of the second; "
        "rank 1 the rest of the second and half of the third; rank 2 what is left.",
    )
    left, cell = 150, 48
    board.words(15, 50, "saved by 4 ranks", 13, GRAY, "start")
    board.words(15, 120, "the whole tensor", 13, GRAY, "start")
    board.words(15, 195, "loaded by 3 ranks", 13, GRAY, "start")
    for rank in range(4):
        board.box(left + 3 * cell * rank, 30, 3 * cell, 36, f"file of rank {rank}", RANKS[rank])
    for element in range(12):
        x = left + cell * element
        board.box(x, 105, cell, 30, str(element), RANKS[element // 3])
    for x in range(4):
        board.arrow(left + cell * (3 * x + 1.5), 66, left + cell * (3 * x + 1.5), 103, color=INK)
    for rank in range(3):
        x = left + 4 * cell * rank
        first, last = 4 * rank, 4 * rank + 3
        for part in {first // 3, last // 3}:
            start, stop = max(first, 3 * part), min(last + 1, 3 * part + 3)
            middle = left + cell * (start + stop) / 2
            board.box(left + cell * start, 178, cell * (stop - start), 36, "", RANKS[part])
            board.arrow(middle, 135, middle, 176, color=INK)
        board.box(x, 174, 4 * cell, 44, "", "none")
        board.words(x + 2 * cell, 232, f"rank {rank}: elements {first} to {last}", 13)
    return board
