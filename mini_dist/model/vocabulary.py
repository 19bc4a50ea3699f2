"""One error for a token outside the vocabulary, for all functions that read tokens."""

from __future__ import annotations

from torch import Tensor


def check_tokens(
    tokens: Tensor, vocab_size: int, what: str = "input token", ignored: int | None = None
) -> None:
    """Raise ValueError unless all tokens but the `ignored` ones are in 0..vocab_size-1.

    what: the word for a token in the message. Ranks that read the same tokens raise alike.
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
