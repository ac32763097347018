"""From token ids to text, one token at a time, showing only what is certain.

Two things make a token's text uncertain. Its bytes may end in the middle of a character, and its
text may be the beginning of a stop string. Both are held back until they are settled, so what was
shown is never taken back, and all of it joined is exactly the decoding of the whole output. (One
exception: decoders with byte fallback turn a whole run of byte tokens into replacement characters if any
part of it is no UTF-8; here the valid characters at its beginning stay what they were shown as.)
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what a decoder makes of an incomplete character
MAX_PENDING = 8  # tokens: an unfinished character has at most 3 bytes, so more than this is no character


def make_decoder(tokenizer: Any, skip_special_tokens: bool = False) -> Callable[[list[int]], str]:
    """Token ids -> text, exactly as the tokenizer decodes them.

    A panic inside a tokenizer written in Rust is no `Exception`; here it is made one, a RuntimeError, so
    that it ends the request it concerns and not the thread.
    """

    def decode(token_ids: list[int]) -> str:
        try:
            return tokenizer.decode(
                token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        except (Exception, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as panic:
            raise RuntimeError(f"the tokenizer broke: {panic}") from panic

    return decode


class IncrementalDecoder:
    """Text of a growing list of token ids, without broken characters.

    It decodes a short window twice, with and without the new tokens, and shows the difference: the
    window gives the tokenizer the context on which spaces depend. A window whose text ends in a
    replacement character may be an unfinished one, so it waits (the method of Hugging Face's TGI).
    """

    def __init__(self, decode: Callable[[list[int]], str]):
        self._decode = decode
        self._token_ids: list[int] = []
        self._window = 0  # the first token of the context
        self._shown = 0  # tokens before this one are shown
        self._context = ""  # text of the tokens from _window to _shown

    def append(self, token_id: int) -> str:
        """Add a token; return the text that is now certain."""
        self._token_ids.append(token_id)
        if self._is_surely_broken(token_id):
            return ""
        text = self._decode(self._token_ids[self._window :])
        if text.endswith(REPLACEMENT) or len(text) <= len(self._context):
            return ""
        new = text[len(self._context) :]
        self._window, self._shown = self._shown, len(self._token_ids)
        self._context = self._decode(self._token_ids[self._window :])
        return new

    def _is_surely_broken(self, token_id: int) -> bool:
        """Spare decoding a long run of tokens that is no text, again and again, to see it is still none.

        Once more is pending than a character has, wait for a token that is text by itself, and look at the
        whole only each time it has doubled: characters that tokens make up together may have come meanwhile.
        """
        pending = len(self._token_ids) - self._shown
        if pending <= MAX_PENDING or pending & (pending - 1) == 0:
            return False
        alone = self._decode([token_id])
        return not alone or alone.endswith(REPLACEMENT)

    def flush(self) -> str:
        """The rest, when no more tokens will come: an unfinished character stays a replacement."""
        return self._decode(self._token_ids[self._window :])[len(self._context) :]


class Detokenizer:
    """The text of one request's output, cut at its stop strings.

    decode: token ids -> text, for all of them at once.
    stop: strings to stop at. include_stop: leave the matched string in the text.
    hidden: tokens that `decode` skips.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        stop: Sequence[str],
        include_stop: bool,
        hidden: Container[int] = (),
    ):
        self._hidden = hidden
        self._decoder = IncrementalDecoder(decode)
        self._stop = stop
        self._include_stop = include_stop
        self._held = ""  # certain text that may turn out to be the beginning of a stop string

    def append(self, token_id: int, check_stop: bool = True) -> tuple[str, str | None]:
        """Add a token; return (text that can be shown now, the stop string that was reached or None)."""
        if token_id in self._hidden:  # a run of them would be a window that never moves
            return "", None
        return self._advance(self._decoder.append(token_id), check_stop)

    def flush(self, check_stop: bool = True) -> tuple[str, str | None]:
        """Everything held back, when the output ends. A stop string may still be found in it."""
        text, matched = self._advance(self._decoder.flush(), check_stop)
        held, self._held = self._held, ""
        return text + held, matched

    def _advance(self, new: str, check_stop: bool) -> tuple[str, str | None]:
        text, self._held = self._held + new, ""
        if check_stop and self._stop:
            found = [(text.find(stop), stop) for stop in self._stop if stop in text]
            if found:
                start, stop = min(found)
                return text[: start + len(stop) if self._include_stop else start], stop
        keep = len(text) - self._longest_stop_prefix_at_end(text)
        self._held = text[keep:]
        return text[:keep], None

    def _longest_stop_prefix_at_end(self, text: str) -> int:
        longest = max(map(len, self._stop), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0
