# WRONG: the running maximum begins at 0 (not -inf): if all scores are below about -745 (float64) or -104 (float32) all weights are 0: 0/0 = nan. "softmax(q kT / sqrt(d)) v".
import math
import torch
def tiled_attention(memory, tile):
    N, M = memory.num_rows("q"), memory.num_rows("k")
    for i in range(0, N, tile):
        q = memory.load("q", i, min(i + tile, N))
        out, total = torch.zeros_like(q), q.new_zeros(len(q), 1)
        top = q.new_full((len(q), 1), 0.0)
        for j in range(0, M, tile):
            end = min(j + tile, M)
            s = q @ memory.load("k", j, end).T / math.sqrt(q.shape[-1])
            new = torch.maximum(top, s.amax(-1, keepdim=True))
            w, shrink = (s - new).exp(), (top - new).exp()
            total, out, top = total * shrink + w.sum(-1, keepdim=True), out * shrink + w @ memory.load("v", j, end), new
        memory.store("out", out / total, i)
