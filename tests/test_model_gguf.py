"""GGUF conversion: same weights as the safetensors they came from, a right tokenizer, a safe cache."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.model.gguf import convert_gguf, short_name
from engine.model.gguf_tokenizer import build_tokenizer
from engine.model.loader import ModelLoadError, load_model
from tests.tiny_models import Driver, tiny_reference, write_gguf


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("GLASS_ENGINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("name", ["llama", "llama-tied", "llama-head-dim", "mistral", "qwen2", "qwen3-tied"])
def test_gguf_gives_the_logits_of_the_weights_it_was_made_from(name, tmp_path):
    """Llama's q and k rows are stored in another order and Qwen's are not: either mistake shows here."""
    reference = tiny_reference(name)
    with torch.no_grad():  # what F16 keeps of the matrices
        for parameter in reference.parameters():
            if parameter.ndim > 1:
                parameter.copy_(parameter.half())
    write_gguf(reference, tmp_path / "tiny-F16.gguf")
    loaded = load_model(str(tmp_path / "tiny-F16.gguf"), dtype="float32", device="cpu")
    tokens = torch.arange(3, 40).tolist()
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
        again = AutoModelForCausalLM.from_pretrained(loaded.path)(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(
        Driver(loaded.model).step({0: tokens}, {0: len(tokens)}), expected, atol=1e-4, rtol=1e-4
    )
    torch.testing.assert_close(again, expected, atol=1e-4, rtol=1e-4)
    assert loaded.name == "tiny" and loaded.eos_token_ids == {0, 2}


def test_tokenizer_and_chat_template_survive_a_reload(tmp_path, cache):
    write_gguf(tiny_reference("llama"), tmp_path / "tiny.gguf")
    path = convert_gguf(tmp_path / "tiny.gguf", lambda stage, fraction: None)
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert tokenizer.special_tokens_map["eos_token"] == "<|stop|>"
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "# a"}], return_dict=False)
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|start|>", "#", "Ġa", "<|stop|>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "# a"


def test_rebuilt_sentencepiece_merges_best_scores_first():
    tokens = ["<unk>", "<s>", "</s>", "<0x0A>", "▁", "a", "b", "ab", "▁ab", "▁a"]
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0, 0, 0, 0, -9, -9, -9, -1, -2, -3],
        "tokenizer.ggml.token_type": [2, 3, 3, 6, 1, 1, 1, 1, 1, 1],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    tokenizer = build_tokenizer(lambda key, default=None: fields.get(key, default))
    ids = tokenizer("ab a\n").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", "▁ab", "▁a", "<0x0A>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab a\n"


def test_unused_tokens_are_no_text_and_unknown_pre_tokenizers_are_refused():
    tokens = [*sorted(ByteLevel.alphabet()), "[PAD256]"]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.token_type": [1] * 256 + [5],
    }
    assert len(build_tokenizer(lambda key, default=None: fields.get(key, default))) == 256
    fields["tokenizer.ggml.pre"] = "novel"
    with pytest.raises(ValueError, match="novel"):
        build_tokenizer(lambda key, default=None: fields.get(key, default))


def test_llama3_scaling_is_recognised_from_its_divisors_or_refused(tmp_path):
    reference = tiny_reference("llama-rope-llama3")
    reference.config.rope_parameters.update(factor=8.0, original_max_position_embeddings=8192)
    file = tmp_path / "tiny.gguf"
    write_gguf(reference, file, rope_freqs=[1.0, 1.0, 1.0, 8.0])
    with pytest.raises(ModelLoadError, match="rope_freqs"):
        load_model(str(file), device="cpu")


def test_cache_is_used_again_and_renewed_with_the_file(tmp_path, cache):
    stages: list[str] = []

    def progress(stage: str, fraction: float) -> None:
        assert 0 <= fraction <= 1
        stages.append(stage)

    file = tmp_path / "tiny.gguf"
    write_gguf(tiny_reference("llama"), file)
    first = convert_gguf(file, progress)
    converted = len(stages)
    assert converted and convert_gguf(file, progress) == first and len(stages) == converted
    write_gguf(tiny_reference("llama-tied"), file)
    assert convert_gguf(file, progress) != first
    assert all(not folder.name.startswith(".") for folder in cache.iterdir())


def test_converting_several_times_at_once_ends_in_one_folder(tmp_path, cache):
    """Each converts into a folder of its own and renames it; who comes second takes the first one's."""
    file = tmp_path / "tiny.gguf"
    write_gguf(tiny_reference("llama"), file)
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: convert_gguf(file, lambda stage, fraction: None), range(4)))
    assert folders == set(cache.iterdir()) and len(folders) == 1


def test_unsupported_files_are_refused_by_name(tmp_path, cache):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a gguf file")
    with pytest.raises(ModelLoadError, match=r"broken\.gguf"):
        load_model(str(broken))
    reference = tiny_reference("llama")
    reference.config.model_type = "gemma"
    write_gguf(reference, tmp_path / "gemma.gguf")
    with pytest.raises(ModelLoadError, match="'gemma'"):
        load_model(str(tmp_path / "gemma.gguf"))
    assert not cache.exists() or not list(cache.iterdir())


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
        ("qwen2.5-0.5b-instruct-q4_k_m.gguf", "qwen2.5-0.5b-instruct"),
        ("tiny-IQ2_XS.gguf", "tiny"),
        ("Llama-3.2-1B-BF16.gguf", "Llama-3.2-1B"),
        ("plain.gguf", "plain"),
    ],
)
def test_short_name(file, name):
    assert short_name(Path(file)) == name
