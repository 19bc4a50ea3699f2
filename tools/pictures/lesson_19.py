"""Lesson 19: what travels with int8 and with top-k, and the feedback loop."""

from board import GRAY, PAPER, RANKS, Board


def what_travels():
    board = Board(
        860,
        300,
        "Left: int8. Four ranks send their codes of chunk 2 to rank 2, which adds numbers and "
        "sends codes of the mean to all. Right: top-k. Each rank sends its own indices and "
        "values to all others, because every rank picked different indices.",
    )
    board.words(205, 18, "int8: chunk 2 of every rank", 14, bold=True)
    for rank in range(4):
        y = 40 + 58 * rank
        board.box(12, y, 92, 42, f"rank {rank}\ncodes", RANKS[rank], 12)
        board.box(310, y, 92, 42, f"rank {rank}\nmean", RANKS[rank], 12)
        board.arrow(104, y + 21, 158, 148)
        board.arrow(256, 148, 308, y + 21)
    board.box(160, 112, 96, 72, "rank 2\nadds up\nnumbers", RANKS[2], 12)
    board.words(205, 284, "one byte per element there, and one back", 13, GRAY)

    board.words(645, 18, "top-k: every rank to every rank", 14, bold=True)
    kept = ((1, 4), (0, 6), (4, 7), (2, 3))
    for rank in range(4):
        y = 40 + 58 * rank
        for place in range(8):
            color = RANKS[rank] if place in kept[rank] else PAPER
            board.box(470 + 15 * place, y + 8, 14, 26, "", color)
        board.arrow(596, y + 21, 648, 148)
        board.words(462, y + 22, f"{rank}", 12, GRAY, "end")
    board.box(650, 92, 180, 112, "on each rank:\nall ranks' indices\nand values", size=12)
    board.words(645, 284, "8 bytes per element sent, to every other rank", 13, GRAY)
    return board


def feedback_loop():
    board = Board(
        760,
        230,
        "A loop. The gradient of this step and the error of the steps before are added. The sum is "
        "compressed. The compressed part is sent to the other ranks. What was left out, the sum "
        "minus what was sent, becomes the error and is added to the next step's gradient.",
    )
    board.box(20, 50, 130, 50, "gradient x\nof this step", RANKS[0])
    board.box(220, 50, 130, 50, "x + error", RANKS[1])
    board.box(420, 50, 130, 50, "compress", RANKS[2])
    board.box(620, 50, 120, 50, "sent to\nall ranks", RANKS[6])
    board.box(320, 150, 190, 50, "error: what was left out\n= (x + error) - sent", RANKS[4])
    board.arrow(150, 75, 218, 75)
    board.arrow(350, 75, 418, 75)
    board.arrow(550, 75, 618, 75)
    board.arrow(485, 100, 440, 148)
    board.arrow(372, 148, 300, 102)
    board.words(190, 128, "added in the next step", 12, GRAY, "middle")
    return board
