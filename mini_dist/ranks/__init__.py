"""Room 2, ranks: run a function on n processes, and record what they send.

It may import `plan`, to check arguments and to write tables. Begin with `launch.py` (the caller's
interface), then `zygote.py` (how a rank starts in milliseconds), then `ledger/` (the record of
every message).
"""
