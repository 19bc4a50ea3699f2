"""Room 6, training: a whole run, from a recipe to checkpoints, on all axes at once.

It may import `strategies` and the rooms below it. Begin with `all_axes/ideas.py` (how the axes
combine in one model), then `trainer/` (one recipe, anywhere), then `checkpoint/`.
"""
