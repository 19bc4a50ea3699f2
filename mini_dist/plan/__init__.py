"""Room 1, plan: sizes, memory, seconds and layouts, computed without torch and without ranks.

Imports nothing of mini_dist. Begin with `config.py` (the two things everything is computed from, a
ModelConfig and a Layout), then `schedule/` (who runs what when in a pipeline), then `calculators/`.
"""
