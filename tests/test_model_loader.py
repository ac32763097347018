"""What a name means, what a checkpoint must hold, and errors that come at once and name the cause."""

from __future__ import annotations

import json
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, MistralConfig, PreTrainedTokenizerFast, Qwen2Config

from bench.machine import weight_bytes
from engine.model import loader
from engine.model.config import ModelConfig
from engine.model.loader import ModelLoadError, choose_dtype, load_model
from tests.tiny_models import TINY_CONFIGS, Driver, tiny_reference


def save(reference, folder, **options):
    reference.save_pretrained(folder, **options)
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "end": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="end").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path):
    return save(tiny_reference("qwen2"), tmp_path / "tiny-qwen")


def edit_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_folder_loads_with_all_its_end_tokens(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    fractions = []
    loaded = load_model(
        str(folder),
        dtype="float32",
        device="cpu",
        max_model_len=64,
        progress=lambda s, f: fractions.append((s, f)),
    )
    assert loaded.name == "tiny-qwen" and loaded.path == folder and loaded.max_model_len == 64
    assert loaded.eos_token_ids == {2, 3, 7, 8}  # config.json, tokenizer, generation_config.json
    assert loaded.dtype == loaded.model.dtype == torch.float32 and loaded.device.type == "cpu"
    assert fractions[-1] == ("loading weights", 1.0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sharded_folder_in_half_precision(tmp_path, dtype):
    reference = tiny_reference("llama")
    loaded = load_model(
        str(save(reference, tmp_path / "m", max_shard_size="60KB")), dtype=dtype, device="cpu"
    )
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 1
    logits = Driver(loaded.model).step({0: [5, 6, 7]})
    with torch.inference_mode():
        expected = reference(torch.tensor([[5, 6, 7]])).logits[0, -1:]
    assert torch.nn.functional.cosine_similarity(logits, expected).item() > 0.99


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "60KB"}])
def test_a_second_copy_of_the_weights_is_neither_loaded_nor_counted(tmp_path, options):
    reference = tiny_reference("llama")
    folder = save(reference, tmp_path / "m", **options)
    save_file({"more": torch.zeros(1000)}, folder / "consolidated.safetensors")
    load_model(str(folder), dtype="float32", device="cpu")
    embedding = reference.get_input_embeddings().weight.numel()
    counted = sum(parameter.numel() for parameter in reference.parameters()) - embedding
    assert weight_bytes(folder, "float32") == 4 * counted


def test_missing_extra_and_misshapen_tensors_are_named(folder):
    bias = "model.layers.1.self_attn.k_proj.bias"
    kept = load_file(folder / "model.safetensors")
    edit_tensors(folder, lambda tensors: tensors.pop(bias))
    with pytest.raises(ModelLoadError, match=f"missing tensor {bias}"):
        load_model(str(folder), device="cpu")
    extra = "model.layers.0.self_attn.q_norm.weight"
    edit_tensors(folder, lambda tensors: tensors.update(kept, **{extra: torch.ones(8)}))
    with pytest.raises(ModelLoadError, match=f"unexpected tensor {extra}"):
        load_model(str(folder), device="cpu")
    edit_tensors(folder, lambda tensors: (tensors.pop(extra), tensors.update({bias: torch.ones(5)})))
    with pytest.raises(ModelLoadError, match=rf"{bias} has shape \[5\], not \[16\]"):
        load_model(str(folder), device="cpu")


def test_damaged_files_are_named(folder):
    (folder / "model.safetensors").write_bytes(b"\x10")
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        load_model(str(folder), device="cpu")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"no \.safetensors file"):
        load_model(str(folder), device="cpu")
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load_model(str(folder), device="cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "/no/such/folder"}, "/no/such/folder"),
        ({"name": "no-such-file.gguf"}, r"no-such-file\.gguf"),
        ({"name": ""}, "''"),
        ({"dtype": "int3"}, "dtype='int3'"),
        ({"device": "abacus"}, "device='abacus'"),
        ({"device": "cuda:99"}, "cuda:99"),
        ({"max_model_len": 0}, "max_model_len=0"),
        ({"max_model_len": 257}, "max_model_len=257"),
    ],
)
def test_bad_arguments_are_refused(folder, options, message):
    with pytest.raises(ModelLoadError, match=message):
        load_model(**{"name": str(folder), **options})


def test_without_network_or_package_the_error_names_both_ways(monkeypatch, tmp_path):
    monkeypatch.setattr(loader, "GGUF_PACKAGE", "no_such_package")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    began = time.monotonic()
    with pytest.raises(ModelLoadError, match=r"SmolLM2-135M-Instruct.*pip install.*a model folder.*\.gguf"):
        load_model("auto", device="cpu")
    assert time.monotonic() - began < 10


def test_auto_dtype_follows_what_the_hardware_multiplies(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    for amx, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda amx=amx: amx, raising=False)
        assert choose_dtype("auto", cpu) == expected
    for capability, expected in (((7, 5), torch.float16), ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert choose_dtype("auto", gpu) == expected
        assert choose_dtype("float16", gpu) == torch.float16
    assert choose_dtype("bfloat16", cpu) == torch.bfloat16


@pytest.mark.parametrize("capability", [(7, 0), (7, 5)])
def test_bfloat16_is_refused_on_a_gpu_that_only_emulates_it(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    number = ".".join(map(str, capability))
    with pytest.raises(ModelLoadError, match=rf"bfloat16.*capability {number}.*dtype='float16'"):
        load_model("auto", dtype="bfloat16", device="cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert choose_dtype("bfloat16", torch.device("cuda")) == torch.bfloat16


SMALL = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("hf", "message"),
    [
        (LlamaConfig(**SMALL, hidden_act="gelu"), "gelu"),
        (
            LlamaConfig(**SMALL, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
            "dynamic",
        ),
        (
            LlamaConfig(**SMALL, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
            "partial_rotary",
        ),
        (LlamaConfig(**SMALL, architectures=["LlamaForSequenceClassification"]), "SequenceClassification"),
        (LlamaConfig(**SMALL | {"num_key_value_heads": 3}), "3 key/value heads"),
        (MistralConfig(**SMALL, sliding_window=8), "sliding_window=8"),
        (
            Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=8, max_window_layers=1),
            "sliding_window=8",
        ),
    ],
)
def test_unsupported_configurations_are_refused_by_name(hf, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(hf)


def test_other_architectures_are_refused_by_name(folder):
    config = json.loads((folder / "config.json").read_text())
    for family, architecture in (("mixtral", "MixtralForCausalLM"), ("gpt2", "GPT2LMHeadModel")):
        (folder / "config.json").write_text(
            json.dumps({"model_type": family, "architectures": [architecture]})
        )
        with pytest.raises(ModelLoadError, match=architecture):
            load_model(str(folder), device="cpu")
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "martian"}))
    with pytest.raises(ModelLoadError, match="martian"):
        load_model(str(folder), device="cpu")


def test_a_window_that_never_bites_is_no_obstacle():
    mistral = MistralConfig(**SMALL, sliding_window=8)
    assert ModelConfig.from_hf(mistral, max_model_len=8).num_heads == 4
    with pytest.raises(ValueError, match="max_model_len=8 keeps"):
        ModelConfig.from_hf(mistral, max_model_len=9)
    ModelConfig.from_hf(MistralConfig(**SMALL, sliding_window=64))
    ModelConfig.from_hf(Qwen2Config(**SMALL, use_sliding_window=False, sliding_window=8))


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_expected_tensors_are_those_of_transformers(name):
    reference = tiny_reference(name)
    state = {key: tuple(tensor.shape) for key, tensor in reference.state_dict().items()}
    if reference.config.tie_word_embeddings:
        del state["lm_head.weight"]
    assert ModelConfig.from_hf(reference.config).tensor_shapes() == state
