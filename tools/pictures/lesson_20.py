"""Lesson 20: gradients leave, the host steps, parameters come back, each behind the computation."""

from board import GRAY, Board

COLORS = ("#9ecae1", "#fdbe85", "#a1d99b", "#dadaeb")


def behind_the_computation():
    board = Board(
        860,
        250,
        "The device computes forward and backward. A unit's gradients leave behind backward, the "
        "host steps each as soon as it is there, and its parameters come back behind the next.",
    )
    rows = ("device", "to the host", "host steps", "to the device")
    for number, name in enumerate(rows):
        board.words(108, 40 + 52 * number, name, 13, anchor="end")
    for unit in range(4):
        board.box(120 + 40 * unit, 20, 38, 40, f"F{unit}", COLORS[0], 12)
    for place, unit in enumerate((3, 2, 1, 0)):
        begin = 290 + 80 * place
        board.box(begin, 20, 78, 40, f"B{unit}", COLORS[0], 12)
        board.box(begin + 80, 72, 44, 40, f"g{unit}", COLORS[1], 12)
        board.box(begin + 126, 124, 62, 40, f"step {unit}", COLORS[2], 11)
        board.box(begin + 190, 176, 44, 40, f"p{unit}", COLORS[3], 12)
    board.words(430, 236, "time", 13, GRAY)
    return board
