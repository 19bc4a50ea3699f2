"""Who inserts the collectives? Tensors as `A[I_X, J]`, a mesh, and rules that say what is sent.

    notation.py   A[I_X, J_Y]{Z}: which axes cut which dims, and which sums are due; parsing
    moves.py      from one placement to another: what each move sends, and the cheapest path
    products.py   A . B -> C: what has to move before and after the local product
    blocks.py     a chain of products, such as an MLP: the cheapest open placements
    on_ranks.py   executes plans on ranks, with our collectives
    strategies.py DP, ZeRO-3, TP, SP, EP, 2D, 3D, one line each

    plan = product("X[B_dp, F_tp] . W[F_tp, D] -> Y[B_dp, D]", {"dp": 2, "tp": 2}, B=8, F=8, D=4)
    print(plan)                                                  # one all_reduce over tp, its bytes
    run(plan, (x, w), mesh)                                      # on a rank: its piece of Y

JAX says sharded (PartitionSpec) for "cut", and DTensor says Shard; they call a sum that is due
"unreduced" or Partial.  Austin et al. 2025, *How to Scale Your Model*, part 3, use a similar
notation.
"""

from .blocks import ATTENTION, MLP, BlockProducts, Found, place
from .moves import Move, cheapest_way
from .notation import Placed, parse, placements
from .on_ranks import piece, run
from .products import ProductPlan, product

__all__ = [
    "ATTENTION",
    "MLP",
    "BlockProducts",
    "Found",
    "Move",
    "Placed",
    "ProductPlan",
    "cheapest_way",
    "parse",
    "piece",
    "place",
    "placements",
    "product",
    "run",
]
