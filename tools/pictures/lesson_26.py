"""Lesson 26: a ring over two hosts, in order and dealt like cards."""

from board import GRAY, INK, MESSAGE, RANKS, WRONG, Board


def two_orders():
    board = Board(
        760,
        250,
        "Four ranks in a ring on two hosts, twice. Left, in order: host 0 has ranks 0 and 1, host "
        "1 has ranks 2 and 3, and the ring leaves each host once. Right, dealt like cards: host 0 "
        "has ranks 0 and 2, host 1 has ranks 1 and 3, and every message of the ring crosses the "
        "uplinks, so each host sends twice as much.",
    )
    for left, title, homes in (
        (20, "in order: 1.5 N out of each host", ((0, 1), (2, 3))),
        (400, "dealt like cards: 3 N out of each host", ((0, 2), (1, 3))),
    ):
        board.words(left + 170, 20, title, 14, INK)
        at = {}
        for host, ranks in enumerate(homes):
            x = left + 210 * host
            board.box(x, 45, 130, 170, line=GRAY)
            board.words(x + 65, 230, f"host {host}", 13, GRAY)
            for row, rank in enumerate(ranks):
                at[rank] = host, x + 35, 65 + 85 * row
                board.box(x + 35, 65 + 85 * row, 60, 45, f"rank {rank}", RANKS[rank])
        for rank in range(4):
            host, x, y = at[rank]
            there, tx, ty = at[(rank + 1) % 4]
            if host == there:
                down = ty > y
                start, end = y + 45 * down, ty + 45 * (not down)
                board.arrow(x + 30, start, tx + 30, end, color=MESSAGE)
            else:
                shift = 8 if host else -8
                start, end = (x + 60, tx) if there else (x, tx + 60)
                board.arrow(start, y + 22 + shift, end, ty + 22 + shift, color=WRONG)
    return board
