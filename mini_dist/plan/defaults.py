"""Numbers that a strategy chooses and the calculator of its memory has to know."""

BUCKET_BYTES = 25 << 20  # the default of torch's DistributedDataParallel (Li et al. 2020, 3.2.3)
IN_PLACE_BYTES = 4 << 20  # a larger bucket is averaged in its own memory
