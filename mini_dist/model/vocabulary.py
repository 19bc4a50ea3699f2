"""One sentence for a token outside the vocabulary, wherever one is read."""

from __future__ import annotations

from torch import Tensor


def check_tokens(
    tokens: Tensor, vocab_size: int, what: str = "input token", ignored: int | None = None
) -> None:
    """Raise ValueError unless all tokens but the `ignored` ones are in 0..vocab_size-1.

    what: what a token is called in the message. All ranks that read the same tokens find out alike.
    """
    if tokens.is_meta:
        return
    tokens = tokens if ignored is None else tokens[tokens != ignored]
    if not tokens.numel():
        return
    low, high = (int(token) for token in tokens.aminmax())
    if low < 0:
        works = "give tokens from 0 up" if ignored is None else f"{ignored} means it does not count"
        raise ValueError(f"{what} {low} lies outside the vocabulary, 0..{vocab_size - 1}: {works}")
    if high >= vocab_size:
        raise ValueError(
            f"{what} {high} lies outside the vocabulary, 0..{vocab_size - 1}: "
            f"vocab_size={high + 1} or more would hold it"
        )
