"""Room 5, strategies: one folder per strategy, each a page to read and an engine for real models.

It may import `collectives`, `model`, `plan` and `ranks`. Strategies never import each other; they
share the files next to the folders. Begin with the pages, in the order of the lessons:
`data_parallel/ideas.py`, `zero/ideas.py`, `tensor_parallel/ideas.py`, `pipeline/ideas.py`.
"""
