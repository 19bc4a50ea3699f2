"""Lesson 18: how old the parameters are that a gradient was taken at."""

from board import BACKWARD, FORWARD, GRAY, INK, MESSAGE, RANKS, WRONG, Board


def three_updates_late():
    board = Board(
        760,
        270,
        "A server and two workers over time. The server's parameters go from version 0 to version "
        "5. The fast worker pulls, computes and pushes four times. The slow worker pulls version 0 "
        "at the start, and when it pushes, three updates of the fast one have been made: its "
        "gradient has staleness 3.",
    )
    left, unit = 140, 118
    for y, name in ((40, "fast worker"), (125, "server"), (215, "slow worker")):
        board.words(15, y, name, 13, GRAY, "start")
    ends = [left, left + unit, left + 2 * unit, left + 3 * unit, left + 3.5 * unit]
    ends += [left + 4 * unit, left + 5 * unit]
    for version, (start, stop) in enumerate(zip(ends, ends[1:])):
        board.box(start, 107, stop - start, 36, f"v{version}", RANKS[version])
    for step in range(4):
        x = left + step * unit
        board.box(x + 8, 22, unit - 16, 36, "gradient", FORWARD)
        board.arrow(x + 8, 105, x + 8, 60, color=GRAY)
        board.arrow(x + unit - 8, 60, x + unit - 1, 105, color=MESSAGE)
    slow = ends[4]
    board.box(left + 8, 197, slow - left - 16, 36, "gradient, at v0", BACKWARD)
    board.arrow(left + 8, 145, left + 8, 195, color=GRAY)
    board.arrow(slow - 8, 195, slow - 1, 145, color=WRONG)
    board.words(slow + 12, 172, "meets v3: staleness 3", 13, INK, "start")
    board.words(left, 255, "from the server: pull.  to the server: push", 12, GRAY, "start")
    return board
