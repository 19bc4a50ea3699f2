"""The same training in other programs: DeepSpeed, Megatron-core, torchtitan, JAX, torchft.

None of them is a requirement: `pip install -e '.[frameworks]'` brings them.  Where one is missing,
a function here gives what it gave in the tested environment, and says so in one line (kept.py).
"""

from .kept import kept, record

__all__ = ["kept", "record"]
