"""Lesson 22: one training run in six programs, counted by two instruments."""

from board import GRAY, INK, MESSAGE, PAPER, RANKS, Board

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


WORDS = (  # ours, DeepSpeed, Megatron-LM, torchtitan
    ("ours", "DeepSpeed (JSON)", "Megatron-LM (arguments)", "torchtitan (config)"),
    ("tp", "tensor_parallel:\nautotp_size", "tensor-model-parallel-size", "tensor_parallel_degree"),
    ("pp", "-", "pipeline-model-parallel-size", "pipeline_parallel_degree"),
    ("dp", "ranks / (tp · pp)", "ranks / (tp · pp · cp)", "data_parallel_shard_degree"),
    ("micro-batch", "train_micro_batch_\nsize_per_gpu", "micro-batch-size", "local_batch_size *"),
    ("accumulated", "gradient_\naccumulation_steps", "(from the global batch)", "(from the rest)"),
    ("global batch", "train_batch_size", "global-batch-size", "global_batch_size"),
    ("ZeRO-1", "stage: 1", "use-distributed-optimizer", "-"),
    ("ZeRO-3", "stage: 3", "(its own FSDP)", "fsdp_reshard_after_\nforward: always"),
)


def their_words_in_ours():
    board = Board(
        760,
        400,
        "A table of words. Our dp, tp, pp, micro-batch size, number of micro-batches, global batch "
        "and ZeRO stage, each with its name in DeepSpeed's JSON file, in Megatron-LM's arguments "
        "and in torchtitan's config. DeepSpeed has no word for pp: the training script "
        "sets it. torchtitan has no word for ZeRO-1.",
    )
    columns = ((10, 104), (118, 184), (306, 226), (536, 214))
    for row, cells in enumerate(WORDS):
        y = 8 + 41 * row
        for column, ((x, width), words) in enumerate(zip(columns, cells)):
            fill = "#f2f2f2" if row == 0 else RANKS[0] if column == 0 else PAPER
            fill = RANKS[5] if words == "-" else fill
            board.box(x, y, width, 36, "no word" if words == "-" else words, fill, 12, line=GRAY)
    board.words(
        380, 386, "* in a pipeline: per step; pipeline_parallel_microbatch_size cuts it", 12
    )
    return board
