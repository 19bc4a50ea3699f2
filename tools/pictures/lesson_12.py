"""Lesson 12: what a pipeline sends, and what waits in it."""

from board import BACKWARD, FORWARD, GRAY, RANKS, Board


def what_waits_in_a_pipeline():
    board = Board(
        760,
        275,
        "Four ranks in a row, each with two layers. Forward, x goes from rank to rank; backward, "
        "its gradient dx comes back. When rank 3 begins its first backward, under 1F1B rank 0 "
        "holds four micro-batches, rank 1 three, rank 2 two, rank 3 one; under GPipe each eight.",
    )
    layers = ("embedding,\nlayers 0, 1", "layers 2, 3", "layers 4, 5", "layers 6, 7,\nhead")
    told = "micro-batches whose activations a rank holds when rank 3 begins its first backward"
    board.words(80, 150, told, 13, GRAY, "start")
    board.words(26, 185, "1F1B", 13, anchor="start")
    board.words(26, 235, "GPipe", 13, anchor="start")
    for rank, color in enumerate(RANKS[:4]):
        x = 80 + 170 * rank
        board.words(x + 60, 18, f"rank {rank}", 13, GRAY)
        board.box(x, 32, 120, 78, layers[rank], color)
        if rank < 3:
            board.arrow(x + 120, 52, x + 168, 52, "x", FORWARD)
            board.arrow(x + 170, 92, x + 122, 92, "dx", BACKWARD)
        for micro in range(4 - rank):
            board.box(x + 15 * micro, 175, 15, 20, str(micro), color)
        for micro in range(8):
            board.box(x + 15 * micro, 225, 15, 20, str(micro), color)
    return board
