"""Text comes out as it becomes certain, never broken, and joins to the decoding of the whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from engine import SamplingParams
from engine.detokenizer import Detokenizer, IncrementalDecoder
from tests.support import tiny_llm, tiny_loaded

TEXTS = [
    "plain words",
    "naïve café",
    "日本語 テスト",
    "👩‍👩‍👧‍👦 and 🏳️‍🌈",
    "각한글",
    "e\u0301 a\u0308",
    "a\n\n b  c\t.",
    "🇩🇪🇫🇷",
]


def byte_decode(token_ids: list[int]) -> str:
    return tiny_loaded().tokenizer.decode(token_ids, skip_special_tokens=True)


def byte_ids(text: str) -> list[int]:
    return tiny_loaded().tokenizer(text)["input_ids"]


def sentencepiece_style() -> Tokenizer:
    """Metaspace words with byte fallback, as Llama-2 and Mistral have."""
    vocab = [("<unk>", 0.0), *[(f"<0x{byte:02X}>", -20.0) for byte in range(256)]]
    vocab += [(word, -5.0) for word in ("▁", "▁the", "▁cat", "s", ".", "▁a", "é", ",", "▁▁")]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return tokenizer


def stream(decode, token_ids) -> list[str]:
    decoder = IncrementalDecoder(decode)
    return [*[decoder.append(token) for token in token_ids], decoder.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_characters_are_whole_and_join_to_the_text(text):
    pieces = stream(byte_decode, byte_ids(text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, 255), max_size=40))
def test_random_bytes_join_to_the_full_decoding(token_ids):
    assert "".join(stream(byte_decode, token_ids)) == byte_decode(token_ids)


@given(st.text(max_size=30))
def test_any_text_joins(text):
    assert "".join(stream(byte_decode, byte_ids(text))) == byte_decode(byte_ids(text))


SENTENCEPIECE = sentencepiece_style()


pieces_of_tokens = st.one_of(
    st.integers(257, 265).map(lambda token: [token]),  # words
    st.characters(exclude_categories=["Cs"]).map(lambda char: [1 + byte for byte in char.encode()]),
)


@given(st.lists(pieces_of_tokens, max_size=20))
def test_sentencepiece_spaces_and_bytes_join(pieces):
    token_ids = [token for piece in pieces for token in piece]
    assert "".join(stream(SENTENCEPIECE.decode, token_ids)) == SENTENCEPIECE.decode(token_ids)


def run_stop(text: str, stop: list[str], include: bool = False) -> tuple[list[str], str | None]:
    detokenizer = Detokenizer(byte_decode, stop, include)
    pieces = []
    for token in byte_ids(text):
        piece, matched = detokenizer.append(token)
        pieces.append(piece)
        if matched:
            return pieces, matched
    piece, matched = detokenizer.flush()
    return [*pieces, piece], matched


def test_stop_string_over_several_tokens_is_cut_exactly_and_never_leaks():
    pieces, matched = run_stop("hello END world", ["END"])
    assert ("".join(pieces), matched) == ("hello ", "END")
    assert not any("E" in piece for piece in pieces)


def test_stop_string_is_kept_if_asked():
    pieces, matched = run_stop("hello END world", ["END"], include=True)
    assert ("".join(pieces), matched) == ("hello END", "END")


def test_beginning_of_a_stop_string_comes_out_when_it_turns_out_not_to_be_one():
    pieces, matched = run_stop("aab aa", ["aaa"])
    assert ("".join(pieces), matched) == ("aab aa", None)


def test_earliest_stop_string_wins():
    assert run_stop("one two", ["two", "ne"])[1] == "ne"


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stopping_token_by_token_equals_cutting_the_whole(text, stop):
    pieces, matched = run_stop(text, stop)
    ends = [text.find(s) + len(s) for s in stop if s in text]
    if not ends:
        assert ("".join(pieces), matched) == (text, None)
        return
    # Token by token, the match that is complete first wins.
    seen = text[: min(ends)]
    assert matched is not None and seen.endswith(matched)
    assert "".join(pieces) == seen[: seen.find(matched)]


def test_streamed_deltas_join_to_the_generated_text():
    llm = tiny_llm()
    params = SamplingParams(max_tokens=60, temperature=3.0, seed=5, ignore_eos=True)
    (whole,) = llm.generate(["Grüße"], params, use_tqdm=False)
    llm.engine.add_request("x", "Grüße", params)
    deltas = []
    while llm.engine.has_unfinished():
        deltas += llm.engine.step()
    text = "".join(delta.outputs[0].text for delta in deltas)
    assert text == whole.outputs[0].text == byte_decode(whole.outputs[0].token_ids)


def test_stop_string_in_generation_and_special_token_as_stop():
    llm = tiny_llm()
    params = SamplingParams(max_tokens=30, temperature=2.0, seed=11, ignore_eos=True)
    text = llm.generate(["abc"], params, use_tqdm=False)[0].outputs[0].text
    needle = text[5:8]
    stopped = llm.generate(
        ["abc"], SamplingParams(max_tokens=30, temperature=2.0, seed=11, ignore_eos=True, stop=needle), False
    )[0].outputs[0]
    assert stopped.text == text[: text.index(needle)]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", needle)
    for skip in (True, False):
        params = SamplingParams(max_tokens=5, stop=["<|eos|>"], ignore_eos=True, skip_special_tokens=skip)
        request = llm.engine.make_request("r", "abc", params)
        assert request.stop_tokens == {257: "<|eos|>"}
