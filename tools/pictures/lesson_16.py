"""Lesson 16: what four ranks have saved, three others load."""

from board import GRAY, INK, RANKS, Board


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
