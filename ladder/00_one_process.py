"""Rung 0: one process trains a tiny GPT on a text."""

import torch
from torch import nn
from torch.nn import functional

# Batch, sequence, width, heads, head dim, vocabulary, layers. b, s, h: this rank's B, S, N.
B, S, D, N, H, V, L = 16, 16, 32, 4, 8, 128, 8
TEXT = b"Every rank holds a part of the model, and together the ranks hold all of it. " * 3
ROWS = torch.tensor(list(TEXT)).unfold(0, S + 1, 1)  # [rows, S + 1]: one token per byte


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(D), nn.RMSNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.up, self.down = nn.Linear(D, 4 * D, bias=False), nn.Linear(4 * D, D, bias=False)

    def forward(self, x):  # [b, s, D] -> [b, s, D]
        y = self.norm1(x)
        qkv = self.qkv(y).unflatten(-1, (-1, 3, H))  # [b, s, h, 3, H]
        q, k, v = qkv.permute(3, 0, 2, 1, 4)  # [b, h, s, H] each
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.out(y.transpose(1, 2).flatten(2))
        x = x + y
        y = self.norm2(x)
        y = self.down(functional.gelu(self.up(y)))
        return x + y


def train(device="cpu"):
    """Return the loss of every step, and how many elements of each kind this process holds."""
    torch.manual_seed(0)
    blocks = [Block() for _ in range(L - 3)]  # The other 3: embedding, norm, head.
    model = nn.Sequential(nn.Embedding(V, D), *blocks, nn.RMSNorm(D), nn.Linear(D, V, bias=False))
    parameters = list(model.to(device).parameters())
    means, squares = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    losses = []
    for step in range(10):
        rows = ROWS[B * step : B * (step + 1)].to(device)
        tokens, targets = rows[:, :-1], rows[:, 1:]  # [B, S]
        model.zero_grad()
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():  # Adam without bias correction.
            for p, mean, square in zip(parameters, means, squares):
                mean.lerp_(p.grad, 0.1)
                square.lerp_(p.grad**2, 0.1)
                p -= 0.01 * mean / (square.sqrt() + 1e-8)
    return losses, {
        "parameters": sum(p.numel() for p in parameters),
        "gradients": sum(p.grad.numel() for p in parameters),
        "optimizer": sum(state.numel() for state in means + squares),
    }


if __name__ == "__main__":
    losses, held = train()
    for step, loss in enumerate(losses):
        print(f"step {step}  loss {loss:.6f}")
    print(held)
