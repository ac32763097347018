"""Progress bars on the standard error; none where that is no terminal."""

from __future__ import annotations

from tqdm.auto import tqdm


def token_bar(name: str, total: int) -> tqdm:
    """Counts output tokens."""
    return tqdm(total=total, desc=name, unit=" tok", leave=False, disable=None, dynamic_ncols=True)


def fraction_bar(name: str) -> tqdm:
    """Goes from 0 to 1."""
    return tqdm(total=1.0, desc=name, bar_format="{desc}: {bar} {elapsed}", leave=False, disable=None)


def elapsed_bar(name: str) -> tqdm:
    """Shows only how long something has taken, each time it is refreshed."""
    return tqdm(desc=name, bar_format="{desc}: {elapsed}", leave=False, disable=None)
