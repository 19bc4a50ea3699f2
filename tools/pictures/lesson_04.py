"""Lesson 04: a node, two networks, and who talks to whom in a hierarchical all-reduce."""

from board import GRAY, INK, MESSAGE, RANKS, WRONG, Board

PCIE, NETWORK = "#bd4300", "#756bb1"


def two_levels():
    board = Board(
        860,
        316,
        "Two nodes of four ranks: first each node reduce-scatters inside, so that each of its "
        "ranks holds one chunk of the node's sum; then each chunk is all-reduced with the same "
        "rank of the other node; then each node all-gathers.",
    )
    for node, left in enumerate((10, 580)):
        board.box(left, 30, 270, 278, dashed=True, line=GRAY)
        board.words(left + 135, 16, f"node {node}", 13, GRAY)
        side = left + 60 if node == 0 else left + 210  # of the fast links
        board.words(side, 58, "fast links", 12, MESSAGE)
        board.line(side, 76, side, 292, MESSAGE, 5)
        for place in range(4):
            x, y = left + (130 if node == 0 else 10), 82 + 54 * place
            board.box(x, y, 130, 44, f"rank {4 * node + place}\nchunk {place}", RANKS[place])
            ends = (side, x) if node == 0 else (side, x + 130)
            board.line(ends[0], y + 22, ends[1], y + 22, MESSAGE, 3)
    board.words(430, 16, "1. reduce-scatter inside", 13, MESSAGE)
    board.words(430, 34, "2. all-reduce between, four ports at once", 13, INK)
    board.words(430, 52, "3. all-gather inside", 13, MESSAGE)
    for place in range(4):
        y = 104 + 54 * place
        board.arrow(430, y, 272, y)
        board.arrow(430, y, 588, y)
        board.words(430, y - 10, f"chunk {place}, N/4", 12)
    return board


def node():
    board = Board(
        720,
        330,
        "A node with eight GPUs: NVLink through switches, PCIe to the processors, one network "
        "port a GPU.",
    )
    board.box(10, 10, 700, 262, dashed=True, line=GRAY)
    board.words(20, 26, "one node", 12, GRAY, "start")
    board.words(14, 89, "NVLink", 12, MESSAGE, "start")
    board.words(14, 157, "PCIe", 12, PCIE, "start")
    for gpu in range(8):
        x = 100 + 76 * gpu
        for shift in (-9, -3, 3, 9):
            board.line(x + shift, 74, x + shift, 104, MESSAGE, 2)
        board.line(x, 142, x, 172, PCIE, 2)
        board.line(x, 200, x, 214, PCIE, 2)
        board.line(x, 242, x, 292, NETWORK, 3)
        board.box(x - 30, 104, 60, 38, f"GPU {gpu}", RANKS[0])
        board.box(x - 30, 214, 60, 28, "port", RANKS[3])
    board.box(70, 44, 592, 30, "NVSwitch: any GPU to any GPU at full rate", RANKS[2])
    for half in (0, 1):
        words = f"PCIe switches, processor {half} and its memory"
        board.box(70 + 304 * half, 172, 288, 28, words, RANKS[1], 12)
    board.box(70, 292, 592, 30, "to the network: InfiniBand or Ethernet switches", RANKS[3])
    return board


def fat_tree():
    board = Board(
        720,
        230,
        "A fat tree: eight nodes on four leaf switches, each joined with both spine switches. A "
        "cut through the middle leaves four nodes on each side.",
    )
    for leaf in range(4):
        x = 100 + 160 * leaf
        for spine in range(2):
            board.line(x, 112, 260 + 160 * spine, 58, GRAY, 1.5)
        for place in (0, 1):
            board.line(x - 20 + 40 * place, 142, x - 40 + 80 * place, 174, INK)
            board.box(x - 70 + 80 * place, 174, 60, 30, f"node {2 * leaf + place}", RANKS[0])
        board.box(x - 55, 112, 110, 30, "leaf switch", RANKS[1])
    for spine in range(2):
        board.box(210 + 160 * spine, 28, 100, 30, "spine switch", RANKS[4])
    board.line(340, 8, 340, 220, WRONG, 2, dashed=True)
    board.words(348, 220, "the cut in half: its links are the bisection", 12, WRONG, "start")
    return board


def torus():
    board = Board(
        720,
        300,
        "A torus of 4 x 4 devices: every row and every column is a ring. A cut through the middle "
        "crosses two links of each row.",
    )
    for line in range(4):
        x, y = 230 + 80 * line, 50 + 60 * line
        board.line(230, y, 470, y, INK, 2)
        board.line(x, 50, x, 230, MESSAGE, 2)
        for x1, y1, x2, y2 in ((190, y, 230, y), (190, y, 190, y - 24), (190, y - 24, 510, y - 24)):
            board.line(x1, y1, x2, y2, GRAY, 1.2)
        for x1, y1, x2, y2 in ((510, y - 24, 510, y), (510, y, 470, y)):
            board.line(x1, y1, x2, y2, GRAY, 1.2)
        top, low, side = 18, 262, x + 30
        for x1, y1, x2, y2 in ((x, 50, x, top), (x, top, side, top), (side, top, side, low)):
            board.line(x1, y1, x2, y2, MESSAGE, 1)
        for x1, y1, x2, y2 in ((side, low, x, low), (x, low, x, 230)):
            board.line(x1, y1, x2, y2, MESSAGE, 1)
    for device in range(16):
        x, y = 230 + 80 * (device % 4), 50 + 60 * (device // 4)
        board.box(x - 22, y - 14, 44, 28, str(device), RANKS[0])
    board.line(354, 6, 354, 284, WRONG, 2, dashed=True)
    board.words(362, 282, "the cut: two links of each row", 12, WRONG, "start")
    return board
