"""The strategies of this course, one line each: (name, sizes of the mesh's axes, expression)."""

from __future__ import annotations

MESH = {"dp": 2, "tp": 4}
CUBE = {"x": 2, "y": 2, "z": 2}
# B: tokens; E: experts, each with room for the same number of tokens.
SIZES = {"B": 256, "D": 128, "F": 512, "E": 8}
STRATEGIES = (
    ("DP, a gradient", MESH, "X[B_dp, D] . dH[B_dp, F_tp] -> dW[D, F_tp]"),
    ("ZeRO-3, forward", MESH, "X[B_dp, D] . W[D_dp, F_tp] -> H[B_dp, F_tp]"),
    ("ZeRO-3, a gradient", MESH, "X[B_dp, D] . dH[B_dp, F_tp] -> dW[D_dp, F_tp]"),
    ("TP, into a region", MESH, "X[B_dp, D] . W[D, F_tp] -> H[B_dp, F_tp]"),
    ("TP, out of it", MESH, "G[B_dp, F_tp] . W[F_tp, D] -> Y[B_dp, D]"),
    ("SP, into a region", MESH, "X[B_dp_tp, D] . W[D, F_tp] -> H[B_dp, F_tp]"),
    ("SP, out of it", MESH, "G[B_dp, F_tp] . W[F_tp, D] -> Y[B_dp_tp, D]"),
    ("EP, to the experts", MESH, "X[E, B_tp, D] -> X[E_tp, B, D]"),
    ("2D (SUMMA)", MESH, "X[B_dp, D_tp] . W[D_dp, F_tp] -> Y[B_dp, F_tp]"),
    ("3D", CUBE, "X[B_x, D_y_z] . W[D_y, F_z_x] -> Y[B_x, F_z_y]"),
)
