"""Lesson 23: the four rules of a product of cut matrices, and a step of SUMMA."""

from board import GRAY, INK, MESSAGE, PAPER, RANKS, WRONG, Board

SIDE = 56


def _matrix(board, x, y, name, cut, due=False):
    """A square, cut "rows", "columns" or not; `due`: two sheets, one a rank."""
    if due:
        board.box(x + 7, y - 7, SIDE, SIDE, fill=RANKS[1])
        board.box(x, y, SIDE, SIDE, name, RANKS[0])
        return
    if not cut:
        board.box(x, y, SIDE, SIDE, name)
        return
    half = SIDE / 2
    for rank in range(2):
        down, right = (rank * half, 0) if cut == "rows" else (0, rank * half)
        size = (SIDE, half) if cut == "rows" else (half, SIDE)
        board.box(x + right, y + down, *size, "" if rank else name, RANKS[rank])


def four_rules():
    board = Board(
        760,
        270,
        "Four products A times B on two ranks. One: A's rows are sharded, so C's rows are. Two: "
        "B's columns are sharded, so C's columns are. Three: A's columns and B's rows are sharded, "
        "so each rank has a partial sum of all of C. Four: only A's columns are sharded, and the "
        "pieces do not fit: gather A, or slice B.",
    )
    rows = (
        ("A[I_X, J] . B[J, K] -> C[I_X, K]", "rows", "", "rows", "1  rows stay sharded"),
        ("A[I, J] . B[J, K_X] -> C[I, K_X]", "", "columns", "columns", "2  columns stay sharded"),
        ("A[I, J_X] . B[J_X, K] -> C[I, K]{X}", "columns", "rows", "due", "3  a sum is due"),
        ("A[I, J_X] . B[J, K]", "columns", "", "?", "4  does not fit: gather, or slice B"),
    )
    for number, (text, a, b, c, words) in enumerate(rows):
        x, y = 20 + 380 * (number % 2), 38 + 132 * (number // 2)
        board.words(x, y - 22, words, 13, INK, "start", bold=True)
        _matrix(board, x, y, "A", a)
        board.words(x + 68, y + SIDE / 2, ".", 20)
        _matrix(board, x + 80, y, "B", b)
        board.words(x + 156, y + SIDE / 2, "=", 16)
        if c == "?":
            board.box(x + 178, y, SIDE, SIDE, "?", dashed=True, line=WRONG)
        else:
            _matrix(board, x + 178, y, "C", "" if c == "due" else c, c == "due")
        board.words(x, y + SIDE + 16, text, 12, GRAY, "start")
    return board


def summa():
    board = Board(
        720,
        300,
        "Three grids of 3 by 3 ranks, for A, B and C, at step 1. In A each rank in column 1 sends "
        "its block to the other two of its row. In B each rank in row 1 sends its block to the "
        "other two of its column. In C every rank adds the product of the two.",
    )
    size = 58
    for number, name in enumerate(
        ("A(i, 1) along its row", "B(1, k) along its column", "C(i, k) +=")
    ):
        left = 25 + 240 * number
        board.words(left + 1.5 * size, 22, name, 14, INK)
        for row in range(3):
            for column in range(3):
                sends = (column == 1, row == 1, False)[number]
                fill = RANKS[0 if number == 0 else 1] if sends else PAPER
                if number == 2:
                    fill = RANKS[2]
                words = ("a", "b", "a . b")[number] if sends or number == 2 else ""
                board.box(left + size * column, 45 + size * row, size, size, words, fill)
        middle = 45 + 1.5 * size
        for other in range(3):
            if number == 0:
                y = 45 + size * (other + 0.75)
                board.arrow(left + 1.1 * size, y, left + 0.4 * size, y, color=MESSAGE)
                board.arrow(left + 1.9 * size, y, left + 2.6 * size, y, color=MESSAGE)
            elif number == 1:
                x = left + size * (other + 0.75)
                board.arrow(x, middle - 0.4 * size, x, middle - 1.1 * size, color=MESSAGE)
                board.arrow(x, middle + 0.4 * size, x, middle + 1.1 * size, color=MESSAGE)
    board.words(360, 262, "step s = 1 of 0, 1, 2: then each rank has added A(i, s) . B(s, k)", 13)
    return board
