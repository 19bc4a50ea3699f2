# WRONG with unequal numbers of tokens: divides by this rank's visits times n, not by all ranks' visits.
# Breaks "f_e = share of the visits that expert e got" of all ranks' tokens. Shown by ranks with different T.
import torch

from mini_dist import all_reduce


def balance_loss(decision, group):
    E = decision.probabilities.shape[1]
    visits = all_reduce(decision.experts.flatten().bincount(minlength=E), group)
    share = visits / (decision.experts.numel() * group.size())
    return E * (share * decision.probabilities.mean(0)).sum(), visits
