"""Lesson 02: what naive data parallelism is, and one parameter server compared with four."""

from board import BACKWARD, FORWARD, GRAY, MESSAGE, PAPER, RANKS, Board


def one_batch_four_ranks():
    board = Board(
        760,
        330,
        "Each of four ranks has the whole model and a quarter of the batch. Their gradients "
        "differ; after they are averaged all ranks take the same step, so the models stay equal.",
    )
    heads = ("a quarter of the batch", "the whole model", "its own gradients", "the mean, the same")
    for x, words in zip((95, 285, 475, 685), heads):
        board.words(x, 22, words, 13, GRAY)
    board.box(562, 150, 56, 46, "mean", line=MESSAGE)
    for rank, color in enumerate(RANKS[:4]):
        y = 45 + 70 * rank
        board.box(20, y, 150, 46, f"rank {rank}: rows {2 * rank}, {2 * rank + 1}", color)
        board.box(230, y, 110, 46, "weights w", PAPER)
        board.box(420, y, 110, 46, f"gradient g{rank}", color)
        board.box(640, y, 110, 46, "w - lr * mean", PAPER)
        board.arrow(170, y + 16, 228, y + 16, color=FORWARD)
        board.arrow(340, y + 16, 418, y + 16, color=BACKWARD)
        board.arrow(530, y + 23, 560, 173 + 9 * (rank - 1.5), color=MESSAGE)
        board.arrow(618, 173 + 9 * (rank - 1.5), 638, y + 23, color=MESSAGE)
    return board


def one_server_k_servers():
    board = Board(
        760,
        330,
        "Four ranks push gradients to a parameter server and pull the sum. On the left rank 0 is "
        "the only server: all three others meet at its one link. On the right each rank is the "
        "server of a quarter of the tensor, and the same bytes are spread over all four links.",
    )
    columns = [65 + 85 * rank for rank in range(4)]
    for left, servers in ((0, 1), (380, 4)):
        heading = "one server, of the whole tensor" if servers == 1 else "four servers, of N/4 each"
        board.words(left + 192, 22, heading, 13, bold=True)
        for server in range(servers):
            words = "all of it" if servers == 1 else f"shard {server}"
            board.box(left + columns[server] - 38, 45, 76, 44, words, RANKS[server])
        for rank, x in enumerate(columns):
            board.box(left + x - 36, 230, 72, 44, f"rank {rank}", RANKS[rank])
            for server in {*range(servers)} - {rank}:
                to = columns[server] + 14 * (rank - server) / servers
                start = x + 10 * (server - rank) / 3
                ends = (left + start, 228, left + to, 92)
                board.arrow(*ends, color=MESSAGE, width=4 if servers == 1 else 1.2)
    board.words(192, 292, "rank 0 sends 3 N, the others N each", 12, GRAY)
    board.words(572, 292, "each sends 3 N/4 as a worker, 3 N/4 as a server", 12, GRAY)
    note = "Arrows: push; pull goes back the same way. Two boxes of one color are one rank."
    board.words(380, 316, note, 12, GRAY)
    return board
