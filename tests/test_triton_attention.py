"""attention_backend="triton": the kernel against PyTorch's attention, and whether it compiles for GPUs.

Without a GPU, Triton's interpreter runs the kernel (`conftest` asks for it).
"""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="the triton package is not installed (it exists for Linux alone)")

from engine import LLM
from engine.model import attention_backends, triton_attention
from engine.model.attention import AttentionMetadata
from engine.model.attention_backends import choose_attention
from engine.model.triton_attention import TILE, TritonAttention, choose_splits, flash_decode
from tests.support import assert_solo, greedy, tiny_folder, tiny_llm, tiny_loaded
from tests.tiny_models import Driver, tiny_model, tiny_reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK_SIZE = 4


def dense(queries, layer, tables, lengths, kv_heads):
    """What each row sees, by PyTorch, in float32, one row at a time."""
    rows, heads, width = queries.shape
    seen = torch.zeros(rows, heads, width, device=queries.device)
    for row, length in enumerate(lengths.tolist()):
        if length:
            context = layer[tables[row]].view(-1, 2, kv_heads, width)[:length].float()
            keys, values = context.repeat_interleave(heads // kv_heads, dim=2).permute(1, 2, 0, 3)
            seen[row] = F.scaled_dot_product_attention(
                queries[row].float().unsqueeze(1), keys, values
            ).squeeze(1)
    return seen


def case(lengths, heads=4, kv_heads=2, head_dim=64, dtype=torch.float32, seed=0):
    """Random queries (within wider rows, as the model has them), a cache, shuffled tables, lengths."""
    torch.manual_seed(seed)
    width = max(1, -(-max(lengths) // BLOCK_SIZE))
    layer = torch.randn(len(lengths) * width + 1, BLOCK_SIZE * 2 * kv_heads * head_dim)
    queries = torch.randn(len(lengths), heads + 2 * kv_heads, head_dim)
    tables = torch.randperm(len(lengths) * width).view(len(lengths), width)
    return (
        queries.to(DEVICE, dtype)[:, :heads],
        layer.to(DEVICE, dtype),
        tables.to(DEVICE),
        torch.tensor(lengths, device=DEVICE),
        kv_heads,
    )


TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
RAGGED = [1, 2, BLOCK_SIZE, BLOCK_SIZE + 1, TILE - 1, TILE, TILE + 1, 2 * TILE, 101]


@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_ragged_rows_equal_dense_attention(dtype, splits):
    """One token, block and tile boundaries with one more and less, and rows of padding, of length 0."""
    given = case([0, *RAGGED, 0], dtype=dtype)
    seen = flash_decode(*given, BLOCK_SIZE, splits)
    assert seen.dtype == dtype and seen[0].eq(0).all() and seen[-1].eq(0).all()
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(seen.float(), dense(*given), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (6, 6), (9, 3), (8, 1), (20, 1)])
def test_heads_share_keys_in_groups_of_any_size(heads, kv_heads):
    given = case([5, 40], heads, kv_heads, head_dim=16)
    torch.testing.assert_close(flash_decode(*given, BLOCK_SIZE, 1), dense(*given), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128])
def test_heads_of_any_width(head_dim):
    given = case([3, 37], head_dim=head_dim)
    torch.testing.assert_close(flash_decode(*given, BLOCK_SIZE, 2), dense(*given), atol=1e-5, rtol=1e-5)


def test_large_scores_do_not_overflow():
    queries, *rest = case([50, 3], head_dim=16)
    given = (queries * 100, *rest)
    torch.testing.assert_close(flash_decode(*given, BLOCK_SIZE, 2), dense(*given), atol=1e-4, rtol=1e-4)


def test_what_lies_beyond_a_length_is_not_even_read():
    """NaN in the rest of the last block, and in blocks that only pad the table, changes nothing."""
    queries, layer, tables, lengths, kv_heads = case([5, 33])
    expected = flash_decode(queries, layer, tables, lengths, kv_heads, BLOCK_SIZE, 2)
    slots = layer.view(len(layer), BLOCK_SIZE, -1)
    slots[tables[0, 1], 1:] = torch.nan
    slots[tables[1, 8], 1:] = torch.nan
    slots[tables[0, 2:]] = torch.nan
    seen = flash_decode(queries, layer, tables, lengths, kv_heads, BLOCK_SIZE, 2)
    assert torch.equal(seen, expected) and seen.isfinite().all()


def test_splits_fill_a_gpu_but_not_with_crumbs():
    assert choose_splits(rows=1, kv_heads=8, longest=64) == 1
    assert choose_splits(rows=1, kv_heads=8, longest=8192) == 32
    assert choose_splits(rows=1, kv_heads=3, longest=8192) == 64
    assert choose_splits(rows=32, kv_heads=8, longest=8192) == 1
    assert choose_splits(rows=256, kv_heads=8, longest=131072) == 1


@pytest.mark.parametrize("name", ["llama", "llama-head-dim", "llama-no-gqa", "qwen3-tied"])
def test_whole_model_equals_the_default_backend(name):
    """Chunks and decode rows in any order within a batch: leading decode rows go to the kernel."""
    rng = random.Random(name)
    reference = tiny_reference(name)
    drivers = [
        Driver(tiny_model(reference, device=DEVICE), attention=attention)
        for attention in (AttentionMetadata, TritonAttention)
    ]
    prompts = {r: [rng.randrange(100) for _ in range(n)] for r, n in enumerate((3, 30, 9))}
    batches = [prompts, {0: [5], 1: [6], 2: [7]}, {1: [8], 0: [9, 10]}, {2: [11, 12], 0: [13]}]
    for batch in batches:
        expected, got = (driver.step(batch) for driver in drivers)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_the_engine_gives_the_same_tokens_by_it():
    prompts = [[1, 2, 3], [7] * 20, [250]]
    for prompt, output in zip(
        prompts,
        tiny_llm(attention_backend="triton").generate(prompts, greedy(8), use_tqdm=False),
        strict=True,
    ):
        assert_solo(prompt, output.outputs[0].token_ids)


CHOICE = (tiny_loaded().config, torch.float32, torch.device("cpu"))


def test_refused_where_it_cannot_work(monkeypatch):
    """Each refusal names the cause, and the backend that works."""
    with pytest.raises(ValueError, match="attention_backend 'flash'; choose one of auto, sdpa, triton"):
        LLM(str(tiny_folder()), attention_backend="flash")
    with monkeypatch.context() as patch:
        patch.setattr(triton_attention, "IS_INTERPRETED", False)
        with pytest.raises(ValueError, match=r"needs a CUDA device, not cpu.*sdpa"):
            choose_attention("triton", *CHOICE)
    with monkeypatch.context() as patch:
        patch.setattr(triton_attention, "flash_decode", lambda *args, **kwargs: 1 / 0)
        patch.setattr(triton_attention, "IS_INTERPRETED", True)
        with pytest.raises(ValueError, match=r"does not work on this cpu device.*ZeroDivisionError.*sdpa"):
            choose_attention("triton", *CHOICE)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        attention_backends.importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "triton" else find_spec(name, *rest),
    )
    with pytest.raises(ValueError, match=r"triton package, which is not installed.*pip install triton.*sdpa"):
        choose_attention("triton", *CHOICE)


COMPILE = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from engine.model.triton_attention import flash_decode_kernel as kernel

DOT_TYPES = {"fp16": tl.float16, "bf16": tl.bfloat16, "fp32": tl.float32}
for capability, kind in ((75, "fp16"), (80, "bf16"), (80, "fp32"), (90, "bf16")):
    constants = dict(BLOCK_SIZE=16, KV_HEADS=3, GROUP=3, HEAD_DIM=80, SPLITS=4, PADDED_GROUP=16)
    constants |= dict(PADDED_DIM=128, TILE=32, DOT_TYPE=DOT_TYPES[kind])
    types = dict(queries=f"*{kind}", cache=f"*{kind}", tables="*i64", lengths="*i64", partial="*fp32")
    types |= dict(weights="*fp32", scale="fp32", query_stride="i32", table_stride="i32")
    types |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, {arg: types[arg] for arg in kernel.arg_names}, constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert compiled.asm["cubin"]
    print(f"sm_{capability}", kind)
"""


def test_compiles_for_gpus_from_the_t4_on(tmp_path):
    """To machine code, which needs no GPU: the interpreter accepts things that the compiler does not."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        cwd=Path(__file__).parents[1],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == ["sm_75 fp16", "sm_80 bf16", "sm_80 fp32", "sm_90 bf16"]
