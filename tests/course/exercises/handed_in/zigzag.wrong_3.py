# int16 positions: above 32,768 tokens they wrap around to negative numbers (the lesson's sequence has 131,072).
# Breaks "the positions of rank r's tokens". Shown by seq_len = 65536.
import numpy as np
import torch


def zigzag(seq_len, size):
    chunks = np.arange(seq_len).astype(np.int16).reshape(2 * size, -1)
    return torch.from_numpy(np.concatenate([chunks[:size], chunks[::-1][:size]], axis=1)).long()
