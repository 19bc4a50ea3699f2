"""Room 1, plan: sizes, memory, seconds and layouts, computed without torch and without ranks.

It imports nothing of mini_dist. Begin with `config.py` (everything is computed from a ModelConfig
and a Layout), then `schedule/` (which rank of a pipeline runs what when), then `calculators/`.
`fields.py` checks arguments and `tables.py` writes tables, for every room.
"""
