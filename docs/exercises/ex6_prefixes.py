"""Exercise 6: know a block by what it holds and by all that came before it.

.venv/bin/python -m pytest docs/exercises/test_ex6_prefixes.py
"""

from __future__ import annotations

from collections.abc import Hashable


def block_keys(token_ids: list[int], block_size: int) -> list[Hashable]:
    """One key for each full block of a prompt.

    Two keys are equal exactly if the blocks hold the same tokens *and* all blocks before them do: the keys
    and values of a token depend on everything before it. A block that is not full gets no key.
    """
    raise NotImplementedError("exercise 6: block_keys")


def num_cached_tokens(known: set[Hashable], token_ids: list[int], block_size: int) -> int:
    """How many tokens of a prompt need no computing, if the blocks with the keys in `known` are there.

    Only blocks from the beginning on count, without a gap. The prompt's last token is always computed, even
    if its block is there, because the first token of the answer comes out of computing it; and since the
    engine shares whole blocks, that block is then computed as a whole.
    """
    raise NotImplementedError("exercise 6: num_cached_tokens")
