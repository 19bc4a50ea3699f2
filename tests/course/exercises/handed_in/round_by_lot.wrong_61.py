# WRONG: "so that the expectation is `x`": lots of 8 bits, so every fraction below 1/256 goes up once in 256. Shown by: 1,000,000 elements of 0.0005, whose mean is 0.0039
import torch


def round_by_lot(x, lots):
    draws = torch.randint(256, x.shape, generator=lots)  # 8 random bits, as in hardware
    whole = x.floor()
    return whole + (draws < 256 * (x - whole))
