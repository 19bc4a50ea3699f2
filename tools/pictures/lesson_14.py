"""Lesson 14: dispatch of two ranks, with the numbers that are worked out by hand."""

from board import GRAY, INK, RANKS, Board

COUNTS = ((3, 0, 2, 1), (1, 4, 2, 2))  # [rank][expert]
SIDE = 26


def _rows(board, x, y, rows):
    """Draw a row of small boxes "sender→expert", in the expert's color."""
    for place, (sender, expert) in enumerate(rows):
        board.box(x + SIDE * place, y, SIDE, 24, f"{sender}→{expert}", RANKS[expert], 11)


def dispatch_of_two_ranks():
    board = Board(
        760,
        305,
        "Rank 0 has six copies and sends three of them, for experts 2 and 3, to rank 1. Rank 1 has "
        "nine and sends five of them, for experts 0 and 1, to rank 0. What arrived, by sender and "
        "then by expert, is sorted by expert, so that each expert has its rows in one piece.",
    )
    x = (130, 450)
    steps = (
        ("its copies,", "by expert"),
        ("what arrived,", "by sender"),
        ("what arrived,", "by expert"),
    )
    for y, lines in zip((80, 180, 260), steps):
        for k, words in enumerate(lines):
            board.words(15, y - 8 + 16 * k, words, 13, GRAY, "start")
    for rank in (0, 1):
        board.words(x[rank] + 104, 30, f"rank {rank}: experts {2 * rank} and {2 * rank + 1}", 13)
        here = (2 * rank, 2 * rank + 1)
        came = [(r, e) for r in (0, 1) for e in here for _ in range(COUNTS[r][e])]
        _rows(board, x[rank], 68, [(rank, e) for e in range(4) for _ in range(COUNTS[rank][e])])
        _rows(board, x[rank], 168, came)
        _rows(board, x[rank], 248, sorted(came, key=lambda row: row[1]))
        first = COUNTS[0][here[0]] + COUNTS[1][here[0]]
        board.words(x[rank] + SIDE * first / 2, 286, f"expert {here[0]}", 12)
        board.words(x[rank] + SIDE * (first + len(came)) / 2, 286, f"expert {here[1]}", 12)
    board.arrow(x[0] + 1.5 * SIDE, 94, x[0] + 1.5 * SIDE, 166, "3 rows", INK)
    board.arrow(x[1] + 7 * SIDE, 94, x[1] + 5 * SIDE, 166, "4 rows", INK)
    board.arrow(x[0] + 4.5 * SIDE, 94, x[1] + 1.5 * SIDE, 166, color=INK)
    board.arrow(x[1] + 2.5 * SIDE, 94, x[0] + 5.5 * SIDE, 166, color=INK)
    board.words(x[0] + 7 * SIDE, 97, "3 rows", 12)
    board.words(x[1] - 12, 100, "5 rows", 12)
    return board
