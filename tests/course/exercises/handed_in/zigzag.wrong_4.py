# Remembers the table by seq_len alone: with another number of ranks the old table comes back.
# Breaks "Return a table [size, S/size]". Shown by (16, 4), then (16, 2).
import torch

TABLES = {}


def zigzag(seq_len, size):
    if seq_len not in TABLES:
        chunks = torch.arange(seq_len).chunk(2 * size)
        TABLES[seq_len] = torch.stack([torch.cat([chunks[r], chunks[2 * size - 1 - r]]) for r in range(size)])
    return TABLES[seq_len]
