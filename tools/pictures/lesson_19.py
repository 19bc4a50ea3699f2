"""Lesson 19: what travels where it can be added up by an owner, and where it can not."""

from board import GRAY, PAPER, RANKS, Board


def what_travels():
    board = Board(
        860,
        300,
        "Left: int8. The codes of chunk 2 go from all ranks to rank 2, which adds up numbers and "
        "sends codes of the sum to all. Right: top-k. Each rank sends its places and values to all "
        "others.",
    )
    board.words(205, 18, "int8: chunk 2 of every rank", 14, bold=True)
    for rank in range(4):
        y = 40 + 58 * rank
        board.box(12, y, 92, 42, f"rank {rank}\ncodes", RANKS[rank], 12)
        board.box(310, y, 92, 42, f"rank {rank}\nmean", RANKS[rank], 12)
        board.arrow(104, y + 21, 158, 148)
        board.arrow(256, 148, 308, y + 21)
    board.box(160, 112, 96, 72, "rank 2\nadds up\nnumbers", RANKS[2], 12)
    board.words(205, 284, "a byte an element there, and one back", 13, GRAY)

    board.words(645, 18, "top-k: everyone to everyone", 14, bold=True)
    kept = ((1, 4), (0, 6), (4, 7), (2, 3))
    for rank in range(4):
        y = 40 + 58 * rank
        for place in range(8):
            color = RANKS[rank] if place in kept[rank] else PAPER
            board.box(470 + 15 * place, y + 8, 14, 26, "", color)
        board.arrow(596, y + 21, 648, 148)
        board.words(462, y + 22, f"{rank}", 12, GRAY, "end")
    board.box(
        650, 92, 180, 112, "on each rank:\nall places and values,\nthe own ones, too", size=12
    )
    board.words(645, 284, "8 bytes for each one kept, from every other rank", 13, GRAY)
    return board
