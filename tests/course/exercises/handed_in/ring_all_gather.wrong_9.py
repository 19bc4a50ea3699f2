# WRONG: .view on x and on the result: raises for x that is not contiguous (a transposed matrix).
import torch
from mini_dist import exchange

def ring_all_gather(x, group):
    r, n = group.rank(), group.size()
    flat = x.view(-1)
    whole = flat.new_empty(n, len(flat))
    whole[r] = flat
    for k in range(1, n):
        exchange(whole[(r - k + 1) % n], (r + 1) % n, (r - 1) % n, group, out=whole[(r - k) % n])
    return whole.view(n * x.shape[0], *x.shape[1:])
