"""What every test of this folder relies on."""

import os

os.environ.setdefault("MPLBACKEND", "agg")  # no test opens a window
