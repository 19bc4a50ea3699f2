"""Lesson 27: the way of a number from a file to the arithmetic, and where a device waits."""

from board import BACKWARD, FORWARD, GRAY, INK, MESSAGE, Board


def what_it_waits_for():
    board = Board(
        820,
        250,
        "Data on the way to a GPU's arithmetic: files of tokens, batches in the host's memory, "
        "tensors in the device's memory, tiles in fast memory, arithmetic units. Where the device "
        "waits for data, read ahead; where it waits for memory, pass over it less often; where it "
        "computes, use fewer bits.",
    )
    boxes = (
        (20, 130, "files\nof tokens", "#dadaeb"),
        (230, 130, "batches in the\nhost's memory", "#dadaeb"),
        (440, 140, "tensors in the\ndevice's memory", FORWARD),
        (660, 140, "tiles in fast\nmemory", FORWARD),
    )
    for x, width, words, color in boxes:
        board.box(x, 60, width, 60, words, color, 13)
    for x1, x2 in ((150, 230), (360, 440)):
        board.arrow(x1, 90, x2, 90, color=GRAY)
    board.arrow(580, 80, 660, 80, color=MESSAGE)
    board.arrow(660, 102, 580, 102, color=MESSAGE)
    board.box(660, 150, 140, 40, "arithmetic units", BACKWARD, 13)
    board.arrow(715, 120, 715, 150, color=GRAY)
    board.arrow(745, 150, 745, 120, color=GRAY)
    for x, title, cure in (
        (230, "It waits for data.", "Read ahead, in workers."),
        (550, "It waits for memory.", "Pass over it less often."),
    ):
        board.words(x if x > 300 else 250, 205, title, 13, INK, bold=True)
        board.words(x if x > 300 else 250, 225, cure, 13, GRAY)
    board.words(730, 212, "It computes.", 13, INK, bold=True)
    board.words(730, 232, "With fewer bits.", 13, GRAY)
    board.line(150, 180, 360, 180, color=GRAY)
    board.line(500, 180, 625, 180, color=MESSAGE)
    board.words(
        405,
        30,
        "An H100 reads 3.35 TB/s from its memory and computes 989 TFLOP/s in bf16.",
        13,
        GRAY,
    )
    return board
