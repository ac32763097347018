"""Slots by letter, as everywhere on the page: A to Z, then AA to AZ, BA to BZ: no two look alike."""

import string


def slot_letter(slot: int) -> str:
    more, last = divmod(slot, 26)
    return (slot_letter(more - 1) if more else "") + string.ascii_uppercase[last]
