"""The tokenizer that a GGUF file describes, as a `transformers` tokenizer.

A GGUF file holds the vocabulary, merges, special ids and chat template, but how text is cut before merging
only as a name ("tokenizer.ggml.pre"). A wrong cut gives ids that are almost right, so an unknown name is
refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

NORMAL, CONTROL, USER_DEFINED, UNUSED = (
    1,
    3,
    4,
    5,
)  # the values of "tokenizer.ggml.token_type" that matter here

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST


def _split(pattern: str) -> list[Any]:
    return [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


# How each kind of byte-level vocabulary cuts text, as in the tokenizer.json of the models it comes from.
_GPT2: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
PRE_TOKENIZERS: dict[str, list[Any]] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": [pre_tokenizers.Digits(individual_digits=True), *_GPT2],
    "qwen2": _split(_QWEN2),
    "deepseek-r1-qwen": _split(_QWEN2),
    "llama3": _split(_LLAMA3),
    "llama-v3": _split(_LLAMA3),
    "llama-bpe": _split(_LLAMA3),
}


def build_tokenizer(get: Callable[..., Any]) -> Any:
    """The tokenizer, with its chat template. get(key, default=None) reads the file's metadata.

    Raises ValueError for a kind of vocabulary or of cutting that is not known.
    """
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = get("tokenizer.ggml.tokens")
    kind = get("tokenizer.ggml.model")
    types: list[int] = get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    # Unused entries only pad the model's vocabulary; text never becomes one.
    vocabulary = {t: index for index, (t, k) in enumerate(zip(tokens, types, strict=True)) if k != UNUSED}
    if kind == "gpt2":
        tokenizer = _byte_level(
            vocabulary, get("tokenizer.ggml.merges"), get("tokenizer.ggml.pre", "default")
        )
    elif kind == "llama":
        scores, prefix = get("tokenizer.ggml.scores"), get("tokenizer.ggml.add_space_prefix", True)
        tokenizer = _sentencepiece(vocabulary, scores, prefix)
    else:
        raise ValueError(f"unsupported tokenizer {kind!r} in the GGUF file; supported are 'gpt2' and 'llama'")

    def of_type(wanted: int, special: bool) -> list[AddedToken]:
        found = (token for token, kind in zip(tokens, types, strict=True) if kind == wanted)
        return [AddedToken(token, normalized=False, special=special) for token in found]

    tokenizer.add_special_tokens(of_type(CONTROL, special=True))
    tokenizer.add_tokens(of_type(USER_DEFINED, special=False))

    def special(name: str) -> str | None:
        index = get(f"tokenizer.ggml.{name}_token_id")
        return None if index is None else tokens[index]

    bos = special("bos")
    if bos is not None and get("tokenizer.ggml.add_bos_token", kind == "llama"):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=special("eos"),
        unk_token=special("unknown"),
        pad_token=special("padding") or special("eos"),
        chat_template=get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
    )


def _byte_level(vocabulary: dict[str, int], merges: list[str], pre: str) -> Tokenizer:
    """GPT-2's scheme: bytes written as printable characters, then byte-pair merges."""
    if pre not in PRE_TOKENIZERS:
        raise ValueError(f"unsupported GGUF pre-tokenizer {pre!r}, not one of {[*PRE_TOKENIZERS]}")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    if "qwen" in pre:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(PRE_TOKENIZERS[pre])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(vocabulary: dict[str, int], scores: list[float], space_prefix: bool) -> Tokenizer:
    """SentencePiece's BPE: the file has no merges, so every way to split a token is one, best score first."""
    merges = []
    for token, index in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((-scores[index], vocabulary[left], vocabulary[right], (left, right)))
    merges.sort()
    pairs = [pair for *_, pair in merges]
    bpe = models.BPE(vocab=vocabulary, merges=pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    prepend = [normalizers.Prepend("▁")] if space_prefix else []
    strip = [decoders.Strip(" ", 1, 0)] if space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer
