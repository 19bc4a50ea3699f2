"""Lesson 27: the way of a number from a file to the arithmetic, and where a device waits."""

from board import BACKWARD, FORWARD, GRAY, INK, MESSAGE, Board


def what_it_waits_for():
    board = Board(
        850,
        245,
        "Data on the way to a GPU's arithmetic: files of tokens, batches in the host's memory, "
        "tensors in the device's memory, tiles in fast memory, arithmetic units. Where the device "
        "waits for data, read ahead; where it waits for memory, pass over it less often; where it "
        "computes, use fewer bits.",
    )
    for x, width, words, color in (
        (20, 120, "files\nof tokens", "#dadaeb"),
        (220, 130, "batches in the\nhost's memory", "#dadaeb"),
        (430, 140, "tensors in the\ndevice's memory", FORWARD),
        (690, 140, "tiles in\nfast memory", FORWARD),
    ):
        board.box(x, 50, width, 60, words, color, 13)
    board.box(690, 150, 140, 40, "arithmetic units", BACKWARD, 13)
    for x1, x2 in ((140, 220), (350, 430)):
        board.arrow(x1, 80, x2, 80, color=GRAY)
    board.arrow(570, 68, 690, 68, color=MESSAGE)
    board.arrow(690, 94, 570, 94, color=MESSAGE)
    board.words(630, 52, "3.35 TB/s", 12, GRAY)
    board.arrow(745, 110, 745, 150, color=GRAY)
    board.arrow(775, 150, 775, 110, color=GRAY)
    board.words(678, 170, "989 TFLOP/s", 12, GRAY, "end")
    for x, y, title, cure in (
        (285, 130, "It waits for data.", "read ahead"),
        (570, 130, "It waits for memory.", "fewer passes"),
        (760, 210, "It computes.", "fewer bits"),
    ):
        board.words(x, y, title, 13, INK, bold=True)
        board.words(x, y + 19, cure, 13, GRAY)
    board.words(20, 222, "Numbers: an H100, bf16 (datasheet).", 12, GRAY, "start")
    return board
