"""Slots by letter, as everywhere on the page: A to Z, then a to z, then from the start again."""

import string

LETTERS = string.ascii_uppercase + string.ascii_lowercase


def slot_letter(slot: int) -> str:
    return LETTERS[slot % len(LETTERS)]
