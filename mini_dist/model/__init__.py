"""Room 3, model: a GPT in plain torch, its loss, its text, and recomputation.

It may import `plan`, but nothing from ranks: one process can train the model. Begin with `gpt.py`,
then `loss.py`. `recompute/ideas.py` shows how a second forward pass saves memory.
"""
