"""Lesson 17: the planner's funnel, and what two layouts send over the network."""

from board import BACKWARD, FORWARD, GRAY, LINE, MESSAGE, RANKS, Board


def _node(board, x, y, colors, first):
    """Draw eight GPUs numbered from `first`. Neighbors with one color are a tp group."""
    board.box(x, y, 150, 82, line=GRAY)
    for gpu, color in enumerate(colors):
        board.box(x + 9 + 34 * (gpu % 4), y + 10 + 34 * (gpu // 4), 30, 28, str(first + gpu), color)


def what_crosses_the_network():
    board = Board(
        760,
        330,
        "Two layouts of 16 GPUs on two nodes; node 0 holds GPUs 0 to 7, node 1 holds GPUs 8 to 15. "
        "Left: tensor parallel 4 and ZeRO-3. In every layer the parameters cross the network twice "
        "per micro-batch and the gradients once. Right: tensor parallel 8, and each node is one "
        "stage of a pipeline. Only the activations x and their gradient dx cross, once per "
        "micro-batch.",
    )
    for x, heading in (
        (20, "tp 4, ZeRO-3 over the rest"),
        (400, "tp 8, each node a stage of a pipeline"),
    ):
        board.words(x + 170, 22, heading, 13, bold=True)
    for node, y in enumerate((45, 225)):
        board.words(16, y + 41, f"node {node}", 12, GRAY, "start")
        _node(board, 70, y, [RANKS[2 * node]] * 4 + [RANKS[2 * node + 1]] * 4, 8 * node)
        _node(board, 450, y, [RANKS[2 * node]] * 8, 8 * node)
    for k, x in enumerate((90, 112, 134, 156, 178, 200)):
        down = k % 2 == 0
        board.arrow(x, 129 if down else 223, x, 223 if down else 129, color=MESSAGE, width=3)
    board.words(232, 155, "every layer, per micro-batch:", 12, MESSAGE, "start")
    board.words(232, 173, "parameters twice,", 12, MESSAGE, "start")
    board.words(232, 191, "gradients once", 12, MESSAGE, "start")
    board.arrow(500, 129, 500, 223, color=FORWARD)
    board.arrow(550, 223, 550, 129, color=BACKWARD)
    board.words(575, 155, "once per micro-batch:", 12, GRAY, "start")
    board.words(575, 173, "x down, dx back", 12, GRAY, "start")
    return board


def the_funnel():
    board = Board(
        760,
        300,
        "A funnel with four levels, each narrower than the one above: all layouts of the devices; "
        "the layouts that fit into memory, with their batch; the ten with the shortest step by "
        "formula; and the plan, after the pipelines among the ten have been simulated.",
    )
    levels = (
        (
            400,
            "all layouts: tp, pp, dp, ZeRO, micro-batch",
            RANKS[5],
            "pp · dp · cp · tp = number of GPUs",
        ),
        (270, "layouts that fit, with their batch", RANKS[0], "fit: bytes by formula"),
        (150, "the first ten", RANKS[2], "throughput: each step by formula"),
        (90, "the plan", RANKS[6], "pipelines of the ten, simulated"),
    )
    for level, (width, words, color, why) in enumerate(levels):
        y = 20 + 70 * level
        board.box(250 - width / 2, y, width, 44, words, color)
        if level:
            above = levels[level - 1][0]
            board.line(250 - above / 2, y - 26, 250 - width / 2, y, LINE)
            board.line(250 + above / 2, y - 26, 250 + width / 2, y, LINE)
        board.words(500, y + 22, why, 13, GRAY, "start")
    return board
