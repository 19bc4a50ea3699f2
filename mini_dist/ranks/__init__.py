"""Room 2, ranks: run a function on n processes, and record what they send.

It may import `plan`, for checks of arguments and for tables. Begin with `launch.py` (what a caller
asks for), then `zygote.py` (how a rank starts in milliseconds), then `ledger/` (the record of every
message).
"""
