"""Lesson 22: one training run in six programs, counted by two instruments."""

from board import GRAY, INK, MESSAGE, RANKS, Board

PROGRAMS = ("ours", "DDP, FSDP2", "DeepSpeed", "Megatron", "torchtitan", "torchft")


def one_run_many_programs():
    board = Board(
        760,
        285,
        "One run, the same model, weights, data and optimizer, goes into six programs: ours, DDP "
        "and FSDP2, DeepSpeed, Megatron-core, torchtitan, torchft. What each of them sends is "
        "counted below twice: by the ledger and by the operating system at the sockets.",
    )
    board.box(230, 15, 300, 45, "one model, its weights, text, AdamW", RANKS[0])
    for place, name in enumerate(PROGRAMS):
        x = 20 + 122 * place
        board.arrow(380, 60, x + 55, 108, color=GRAY)
        board.box(x, 110, 110, 45, name, RANKS[1 + place % 3])
        board.arrow(x + 55, 155, x + 55, 200, color=MESSAGE)
    board.box(20, 205, 720, 62, line=GRAY)
    board.words(380, 230, "the ledger: what was asked of torch.distributed", 14, INK)
    board.words(380, 252, "the operating system: what went over the sockets", 14, INK)
    return board
