"""Lesson 05: who does what while backward runs, on one rank."""

from board import BACKWARD, GRAY, MESSAGE, PAPER, RANKS, Board

LEFT, WIDTH = 120, 100  # of the backward of a layer


def who_sends_a_bucket():
    board = Board(
        730,
        318,
        "One rank while backward runs: layers 5, 4 and 3 are done, layer 2 is being computed. Each "
        "finished gradient lowers the count of its bucket. Bucket 0 has none missing: it was "
        "handed to the one sender thread, which all-reduces it with the other ranks' senders.",
    )
    board.words(10, 50, "backward", 13, GRAY, "start", bold=True)
    board.words(10, 68, "goes on", 13, GRAY, "start")
    for place in range(6):
        x, layer = LEFT + WIDTH * place, 5 - place
        words = f"B{layer}" + ("\nnow" if place == 3 else "")
        board.box(x, 34, WIDTH - 8, 44, words, BACKWARD if place < 4 else PAPER, dashed=place > 3)
        if place < 3:
            board.arrow(x + 46, 80, x + 46, 122, "hook: -1")
    board.words(10, 146, "buckets", 13, GRAY, "start", bold=True)
    for number, missing in enumerate((0, 1, 2)):
        x = LEFT + 2 * WIDTH * number
        words = f"bucket {number}: {missing} missing"
        board.box(x, 124, 2 * WIDTH - 8, 44, words, RANKS[number] if number < 2 else PAPER)
    board.words(10, 250, "sender", 13, GRAY, "start", bold=True)
    board.words(10, 268, "one thread", 13, GRAY, "start")
    board.arrow(LEFT + 96, 170, LEFT + 96, 232, "complete, so submit(...)", color=MESSAGE)
    board.box(LEFT, 234, 2 * WIDTH - 8, 48, "all-reduce of bucket 0\nmean over all ranks", RANKS[0])
    board.arrow(LEFT + 192, 250, LEFT + 330, 250, color=MESSAGE)
    board.arrow(LEFT + 330, 268, LEFT + 194, 268, color=MESSAGE)
    others = "the other ranks' senders,\nthe same buckets in the same order"
    board.box(LEFT + 332, 234, 270, 48, others)
    board.words(LEFT, 304, "then bucket 1, then bucket 2, on every rank", 12, GRAY, "start")
    return board
