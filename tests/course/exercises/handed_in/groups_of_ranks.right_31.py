# RIGHT: numpy: reshape the ranks to the grid, move the axis to the end, flatten the rest.
import numpy as np


def groups_of_ranks(stages, replicas, pieces, shards):
    shape = (stages, replicas, pieces, shards)
    grid = np.arange(np.prod(shape)).reshape(shape)
    return {
        name: np.moveaxis(grid, axis, -1).reshape(-1, shape[axis]).tolist()
        for axis, name in enumerate(("pp", "dp", "cp", "tp"))
    }
