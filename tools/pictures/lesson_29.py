"""Lesson 29: five things to do before somebody else's money is spent."""

from board import FORWARD, GRAY, INK, RANKS, Board


def your_run():
    board = Board(
        760,
        190,
        "Five boxes in a row, joined by arrows: plan, strategy, run, faults, report. Below each "
        "box is the question that it answers: can we afford it, is my code fast at that size, does "
        "it survive a dead rank, what is wrong with it, and would you sign this. The first four "
        "boxes are judged by check, with two points each. The report is read by a person, with two "
        "points.",
    )
    steps = [
        ("plan", "can we\nafford it?", RANKS[0]),
        ("strategy", "is my code fast\nat that size?", RANKS[1]),
        ("run", "does it survive\na dead rank?", RANKS[2]),
        ("faults", "what is\nwrong with it?", RANKS[3]),
        ("report", "would you\nsign this?", FORWARD),
    ]
    for number, (title, question, color) in enumerate(steps):
        x = 20 + 148 * number
        board.box(x, 20, 110, 55, title, color, 15)
        for row, line in enumerate(question.split("\n")):
            board.words(x + 55, 98 + 17 * row, line, 13, INK)
        if number:
            board.arrow(x - 37, 47, x - 3, 47, color=GRAY)
    board.line(20, 140, 574, 140, color=GRAY)
    board.words(297, 160, "judged by check: two points each", 13, GRAY)
    board.line(612, 140, 722, 140, color=GRAY)
    board.words(667, 160, "read by a person: two", 13, GRAY)
    return board
