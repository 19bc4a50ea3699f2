# WRONG: x.view raises for x that is not contiguous.
import torch
from mini_dist import exchange
def all_to_all(x, group):
    r, n = group.rank(), group.size()
    parts = x.view(n, -1)
    out = torch.empty_like(parts)
    out[r] = parts[r]
    for k in range(1, n):
        exchange(parts[(r + k) % n], (r + k) % n, (r - k) % n, group, out=out[(r - k) % n])
    return out.view(x.shape)
