"""Lesson 11: queries stay, keys and values go round the ring."""

from board import GRAY, MESSAGE, PAPER, RANKS, Board


def keys_go_round():
    board = Board(
        820,
        330,
        "Four ranks, four steps. Every rank keeps its queries; keys and values move to the next "
        "rank after each step, those of rank 3 to rank 0. After four steps all queries have met "
        "all keys.",
    )
    for rank in range(4):
        y = 45 + 62 * rank
        board.words(62, y + 19, f"rank {rank}", 13, GRAY, "end")
        board.box(74, y - 5, 722, 48, "", PAPER, line=RANKS[rank])
        board.box(82, y, 60, 38, f"q{rank}", RANKS[rank])
    for step in range(4):
        left = 200 + 168 * step
        board.words(left + 32, 20, f"step {step}", 14, bold=True)
        for rank in range(4):
            y, owner = 45 + 62 * rank, (rank - step) % 4
            board.box(left, y, 64, 38, f"k{owner} v{owner}", RANKS[owner])
            if step < 3 and rank < 3:
                board.arrow(left + 66, y + 23, left + 166, y + 62 + 15, color=MESSAGE)
            elif step < 3:
                board.arrow(left + 66, y + 10, left + 166, 45 + 28, color=MESSAGE, dashed=True)
    board.words(112, 20, "stay", 14, bold=True)
    board.words(410, 310, "in every step: attend with q to the k and v that are here", 13, GRAY)
    return board
