"""Lesson 24: two texts, their block tables, and the memory that both use."""

from board import GRAY, PAPER, RANKS, Board

SHARED, ARROWS = "#cccccc", ("#4a90c4", "#bd4300")


def block_table():
    board = Board(
        860,
        320,
        "Two texts of ten and nine tokens in blocks of four. Their first block is the same and is "
        "stored once, in block 7. The others lie wherever a block was free: 1 and 4 for the first "
        "text, 2 and 5 for the second. The last block of each is not full; nothing else is empty.",
    )
    texts = [
        ("text a", (7, 1, 4), (4, 4, 2), RANKS[0]),
        ("text b", (7, 2, 5), (4, 4, 1), RANKS[1]),
    ]
    for row, (name, table, filled, color) in enumerate(texts):
        y = 46 + 150 * row
        board.words(20, y + 20, name, 14, anchor="start", bold=True)
        board.words(20, y + 42, f"{sum(filled)} tokens", 12, GRAY, "start")
        for i, (block, count) in enumerate(zip(table, filled)):
            x = 110 + 96 * i
            for place in range(4):
                has = place < count
                fill = (SHARED if block == 7 else color) if has else PAPER
                board.box(x + 22 * place, y, 20, 40, "", fill, dashed=not has, line="#bbbbbb")
            board.words(x + 43, y + 56, f"tokens {4 * i} to {4 * i + 3}", 11, GRAY)
        board.words(470, y - 14, "its table", 12, GRAY)
        for i, block in enumerate(table):
            board.box(450, y + 26 * i, 40, 24, str(block), PAPER)
    board.words(730, 20, "the memory", 14, bold=True)
    owner = {7: SHARED, 1: RANKS[0], 4: RANKS[0], 2: RANKS[1], 5: RANKS[1]}
    full = {7: 4, 1: 4, 4: 2, 2: 4, 5: 1}
    for block in range(9):
        y = 38 + 30 * block
        board.words(650, y + 13, str(block), 12, GRAY, "end")
        for place in range(4):
            has = place < full.get(block, 0)
            fill = owner[block] if has else PAPER
            board.box(664 + 34 * place, y, 32, 26, "", fill, dashed=not has, line="#bbbbbb")
    for row, (_, table, _, _) in enumerate(texts):
        for i, block in enumerate(table):
            y = 46 + 150 * row + 26 * i + 12
            board.arrow(492, y, 632, 38 + 30 * block + 13, "", ARROWS[row], 1.4)
    return board
