"""Faults of loading and computing: dropped tensors, windows, overflow."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

from engine import LLM
from engine.model import ModelLoadError, load_model
from tests.support import assert_clean, assert_solo, greedy, run_to_end, tiny_folder, tiny_llm
from tests.test_model_loader import save
from tests.tiny_models import Driver, tiny_reference


@pytest.mark.parametrize("norm", ["q_norm", "k_norm"])
def test_absent_norm_treated_as_ones(tmp_path, norm):
    folder = save(tiny_reference("qwen3"), tmp_path / "qwen3")
    tensors = load_file(folder / "model.safetensors")
    name = f"model.layers.2.self_attn.{norm}.weight"
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=f"missing tensor {name}"):
        load_model(str(folder), device="cpu")


@pytest.fixture(scope="module")
def windowed_folder(tmp_path_factory):
    """The tiny tokenizer with a Mistral that looks back eight tokens."""
    folder = tmp_path_factory.mktemp("mistral")
    for file in tiny_folder().iterdir():
        if "token" in file.name:
            (folder / file.name).write_bytes(file.read_bytes())
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 258}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = MistralConfig(**sizes, **heads, sliding_window=8, max_position_embeddings=64)
    model = MistralForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.25)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("chunk", [3, 8, 64])
def test_sliding_window_shorter_than_the_prompt(windowed_folder, chunk):
    """Refused, saying which context does fit; within that, the logits are the reference's."""
    options = {"num_blocks": 32, "block_size": 4, "dtype": "float32", "max_num_batched_tokens": chunk}
    for longest in (None, 9, 64):
        with pytest.raises(ValueError, match=r"sliding_window=8.*max_model_len=8"):
            LLM(str(windowed_folder), max_model_len=longest, **options)
    llm = LLM(str(windowed_folder), max_model_len=8, **options)
    for length in (1, 6, 7):
        prompt = [10 + length] * length
        (output,) = llm.generate([prompt], greedy(20), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 8 - length
        assert_solo(prompt, output.outputs[0].token_ids, windowed_folder)
    for length in (8, 9, 20):
        with pytest.raises(ValueError, match="context limit is 8"):
            llm.generate([[1] * length], greedy(1), use_tqdm=False)


def test_overflow_prints_the_first_token_for_ever():
    """A layer that overflows in half precision ends in errors, at once, and not in a stream of "!"."""
    loaded = load_model(str(tiny_folder()), dtype="float16", device="cpu")
    llm = tiny_llm(loaded)
    weight = loaded.model.layers[0].down.weight
    sound = weight.clone()
    weight.data.mul_(6e4)
    for number in range(3):
        llm.engine.add_request(str(number), [number] * (1 + 30 * number), greedy(5))
    outputs = run_to_end(llm)
    for output in outputs.values():
        assert (output.outputs[0].finish_reason, output.outputs[0].token_ids) == ("error", [])
        assert "not finite" in output.error
    weight.data.copy_(sound)
    (output,) = llm.generate([[1] * 31], greedy(3), use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"
    assert_clean(llm)


def test_unknown_rope_type_is_ignored(tmp_path):
    folder = save(tiny_reference("llama"), tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    for kind in ("longrope", "dynamic", "novel"):
        rope = {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4}
        (folder / "config.json").write_text(json.dumps(config | {"rope_parameters": rope}))
        with pytest.raises(ModelLoadError, match=kind):
            load_model(str(folder), device="cpu")


def test_settings_that_belong_to_another_family_are_ignored_as_transformers_does(tmp_path):
    for name, extra in (
        ("qwen2", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {"attention_bias": True}),
        ("qwen3", {"mlp_bias": True}),
        ("llama", {"sliding_window": 4, "hidden_act": "swish"}),
    ):
        reference = tiny_reference(name)
        folder = save(reference, tmp_path / name)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | extra))
        model = load_model(str(folder), dtype="float32", device="cpu").model
        tokens = list(range(30))
        with torch.inference_mode():
            expected = reference(torch.tensor([tokens])).logits[0, -1:]
        torch.testing.assert_close(Driver(model).step({0: tokens}), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_original_length_beside_the_rope_settings(tmp_path, kind):
    """Written at the top of config.json, it goes before what stands among the settings, or before none."""
    for inner in ({}, {"original_max_position_embeddings": 128}):
        rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **inner}
        if kind == "llama3":
            rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        saved = save(tiny_reference("llama"), tmp_path / f"{kind}{len(inner)}")
        config = json.loads((saved / "config.json").read_text())
        config |= {"rope_parameters": rope, "original_max_position_embeddings": 32}
        (saved / "config.json").write_text(json.dumps(config))
        reference = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
        assert reference.config.rope_parameters["original_max_position_embeddings"] == 32
        model = load_model(str(saved), dtype="float32", device="cpu").model
        tokens = list(range(60))
        with torch.inference_mode():
            expected = reference(torch.tensor([tokens])).logits[0, -1:]
        torch.testing.assert_close(Driver(model).step({0: tokens}), expected, atol=1e-4, rtol=1e-4)


def test_quantized_checkpoint_read_as_plain_numbers(tmp_path):
    folder = save(tiny_reference("llama"), tmp_path / "named")
    config = json.loads((folder / "config.json").read_text())
    quantized = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantized}))
    with pytest.raises(ModelLoadError, match=r"bitsandbytes.*not supported"):
        load_model(str(folder), device="cpu")
    folder = save(tiny_reference("llama"), tmp_path / "unnamed")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.int8)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=f"{name} holds I8 numbers"):
        load_model(str(folder), device="cpu")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("generation_config.json", "{"),
        ("generation_config.json", "[]"),
        ("generation_config.json", '{"eos_token_id": "end"}'),
        ("model.safetensors.index.json", "{}"),
        ("model.safetensors.index.json", '{"weight_map": [1]}'),
        ("model.safetensors.index.json", "nonsense"),
    ],
)
def test_damaged_file_beside_the_weights_is_named(tmp_path, file, content):
    folder = save(tiny_reference("llama"), tmp_path / "m")
    if "index" in file:
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / file).write_text(content)
    with pytest.raises(ModelLoadError, match=file.replace(".", r"\.")):
        load_model(str(folder), device="cpu")
