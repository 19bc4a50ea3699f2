"""Lesson 20: parameters arrive, gradients leave, the host steps, each behind the computation."""

from board import GRAY, Board

COMPUTE, OUT, STEP, BACK = "#9ecae1", "#fdbe85", "#a1d99b", "#dadaeb"


def behind_the_computation():
    board = Board(
        900,
        270,
        "One step over time, in four lanes. To the device: the parameters p0 to p3 of four units "
        "arrive, each while the unit before it computes; p1 and p0 come again for backward. "
        "Device: forward F0 to F3, then backward B3 to B0. To the host: the gradients g3 to g0 "
        "leave, each when its unit's backward is over. Host: after backward it steps unit 0 "
        "first; p0 returns while unit 1 is stepped, and the next forward begins.",
    )
    rows = ("to the device", "device", "to the host", "host steps")
    for number, name in enumerate(rows):
        board.words(112, 40 + 52 * number, name, 13, anchor="end")

    def box(lane, begin, width, words, color):
        board.box(begin, 20 + 52 * lane, width - 2, 40, words, color, 12)

    for unit in range(4):
        box(0, 124 + 42 * unit, 42, f"p{unit}", BACK)
        box(1, 166 + 42 * unit, 42, f"F{unit}", COMPUTE)
    for number, unit in enumerate((3, 2, 1, 0)):
        begin = 334 + 84 * number
        box(1, begin, 84, f"B{unit}", COMPUTE)
        box(2, begin + 84, 42, f"g{unit}", OUT)
        if unit > 1:  # units 3 and 2 stay on the device from forward to backward
            box(0, begin, 42, f"p{unit - 2}" if unit == 2 else "p1", BACK)
    for unit in range(4):
        box(3, 712 + 42 * unit, 42, f"s{unit}", STEP)
    for unit in range(3):
        box(0, 754 + 42 * unit, 42, f"p{unit}", BACK)
    for unit in range(2):
        box(1, 796 + 42 * unit, 42, f"F{unit}", COMPUTE)
    board.line(795, 14, 795, 230, dashed=True)
    board.words(780, 242, "the next step's forward can begin", 12, GRAY)
    board.words(400, 242, "time →", 13, GRAY)
    return board
