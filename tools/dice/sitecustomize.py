"""The random numbers of another CPU: the same draws, other in their last bits.

torch draws normal numbers through a logarithm and a cosine, which it computes differently with
vector instructions than without: a third of all values differ, by up to 3e-6 of themselves and more
near 0 (measured, with and without AVX2). So do all numbers computed from them, from a model's first
loss to its last step. Python imports a module of this name at its start if it is on the path, and
tools/everywhere.py puts it there: in pytest, in kernels, in the process that forks ranks.
"""

import importlib.abc
import importlib.util
import sys

ULPS = 32  # of 2**-23: 4e-6


def shaken(drawn):
    """`drawn`, each float32 up to 32 ulps off; by how many depends on its value alone, so that
    ranks that draw the same still do.
    """
    import torch

    if drawn.dtype == torch.float32:
        with torch.no_grad():
            bits = drawn.view(torch.int32)
            step = (bits.long() * 2654435761 >> 7) % (2 * ULPS + 1) - ULPS
            step[drawn == 0] = 0  # A step below zero's bits would be a NaN.
            drawn.copy_((bits + step.int()).view(torch.float32))
    return drawn


def patch(torch):
    normal_, randn = torch.Tensor.normal_, torch.randn

    def shaken_randn(*shape, requires_grad=False, **options):
        return shaken(randn(*shape, **options)).requires_grad_(requires_grad)

    torch.Tensor.normal_ = lambda self, *args, **options: shaken(normal_(self, *args, **options))
    torch.randn = shaken_randn


class WhenTorchIsLoaded(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)  # the next to be asked is the one that knows
        spec = importlib.util.find_spec(name)
        if spec is None:
            return None
        load = spec.loader.exec_module

        def load_and_patch(module):
            load(module)
            patch(module)

        spec.loader.exec_module = load_and_patch
        return spec


sys.meta_path.insert(0, WhenTorchIsLoaded())
