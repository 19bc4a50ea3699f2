"""Lesson 00: what `launch` does with a function of the notebook."""

from board import FORWARD, GRAY, MESSAGE, RANKS, Board


def four_processes_in_a_cell():
    board = Board(
        800,
        310,
        "The notebook's process sends a function to four new processes, the ranks. Each has a "
        "memory of its own with a copy of the notebook's counter, and changes only that. What the "
        "ranks return comes back as a list in their order. The group joins the ranks.",
    )
    board.box(10, 100, 180, 84, "your notebook\ncounter = [0]\ndef count(group): ...")
    board.words(100, 204, "stays [0]", 12, GRAY)
    board.box(650, 100, 140, 84, "your notebook\nrun.results\n[1, 2, 3, 4]")
    for rank, color in enumerate(RANKS[:4]):
        y = 10 + 70 * rank
        if rank:
            board.line(420, y - 20, 420, y, FORWARD, 7)
        board.box(310, y, 220, 50, f"process of rank {rank}\nits counter = [{rank + 1}]", color)
        board.arrow(190, 127 + 10 * rank, 308, y + 25)
        board.arrow(530, y + 25, 648, 127 + 10 * rank, color=MESSAGE)
    board.words(165, 62, "the function", 12)
    board.words(165, 77, "and copies", 12)
    board.words(690, 62, "what each", 12, MESSAGE)
    board.words(690, 77, "rank returns", 12, MESSAGE)
    group = "the group: any rank can send to any other, and shares nothing else"
    board.words(420, 290, group, 12, GRAY)
    return board
