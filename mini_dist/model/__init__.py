"""Room 3, model: a GPT in plain torch, its loss, its text, and recomputation.

It may import `plan` and knows nothing of ranks: one process trains with it. Begin with `gpt.py`,
then `loss.py`; `recompute/ideas.py` trades memory for a second forward.
"""
