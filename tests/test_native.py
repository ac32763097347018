"""kernels="native": the kernels in C++ against their definition in PyTorch, and where they can be had."""

from __future__ import annotations

import os
import random

import pytest
import torch
import torch.nn.functional as F

from engine import LLM
from engine.batch import Batch
from engine.model import native
from engine.model.attention import AttentionMetadata
from engine.model.attention_backends import choose_attention
from engine.model.config import ModelConfig
from engine.model.kernels import TorchKernels, choose_kernels
from engine.model.kv_cache import KVCache
from engine.model.native import AmxLinear, NativeAttention, NativeError, NativeKernels, build
from tests.support import assert_solo, greedy, tiny_folder, tiny_loaded
from tests.tiny_models import TINY_CONFIGS, Driver, tiny_model, tiny_reference

CPU = torch.device("cpu")
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}

try:
    HAS_AMX = native.has_amx()
except NativeError as error:
    if os.environ.get("CI"):
        raise
    pytest.skip(str(error), allow_module_level=True)


def config(heads: int, kv_heads: int, head_dim: int) -> ModelConfig:
    return ModelConfig(
        architecture="llama", vocab_size=100, hidden_size=64, intermediate_size=96, num_layers=1,
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, rms_norm_eps=1e-5, rope_theta=1e4,
        rope_scaling=None, max_position_embeddings=4096, tie_word_embeddings=False,
    )  # fmt: skip


def case(lengths, heads=4, kv_heads=2, head_dim=64, dtype=torch.float32, block_size=4, seed=0):
    """Requests of (query tokens, context tokens): a batch, queries within wider rows, and a random cache."""
    torch.manual_seed(seed)
    shape = config(heads, kv_heads, head_dim)
    queries = [q for q, _ in lengths]
    contexts = [c for _, c in lengths]
    width = -(-max(contexts) // block_size)
    cache = KVCache(shape, len(lengths) * width, block_size, dtype, "cpu")
    cache.layers[0].normal_()
    tables = torch.randperm(len(lengths) * width).view(len(lengths), width)
    positions = torch.cat([torch.arange(c - q, c) for q, c in lengths])
    lens = torch.tensor([queries, contexts])
    batch = Batch(positions, positions, positions, tables, queries, contexts, lens, positions[:0])
    rows = torch.randn(sum(queries), heads + 2 * kv_heads, head_dim).to(dtype)
    return batch, shape, cache, rows[:, :heads]


def attend(backend, batch, shape, cache, queries):
    return backend.build(batch, shape, cache.block_size, queries.dtype).attend(queries, cache, 0)


def assert_like_sdpa(given):
    expected, got = attend(AttentionMetadata, *given), attend(NativeAttention, *given)
    tolerance = TOLERANCES[got.dtype]
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


# Decode rows and chunks of prompts; contexts around the borders of blocks and of the 16 keys seen at once.
RAGGED = [
    (1, 1),
    (1, 2),
    (1, 4),
    (1, 5),
    (1, 15),
    (1, 16),
    (1, 17),
    (1, 33),
    (1, 101),
    (3, 3),
    (8, 8),
    (9, 40),
    (33, 50),
]


@pytest.mark.parametrize("block_size", [1, 4, 16, 20])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_attention_of_ragged_requests_equals_pytorchs(dtype, block_size):
    assert_like_sdpa(case(RAGGED, dtype=dtype, block_size=block_size))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128])
def test_heads_of_any_width(head_dim, dtype):
    assert_like_sdpa(case([(1, 37), (5, 21)], head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (6, 6), (9, 3), (8, 1), (20, 1)])
def test_heads_share_keys_in_groups_of_any_size(heads, kv_heads, dtype):
    for lengths in (
        [(1, 70)],
        [(1, 5), (1, 40), (1, 7), (12, 30), (1, 1)],
    ):  # heads shared out to threads, or not
        assert_like_sdpa(case(lengths, heads, kv_heads, dtype=dtype))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_large_scores_do_not_overflow(dtype):
    batch, shape, cache, queries = case([(1, 50), (4, 9)], dtype=dtype)
    assert_like_sdpa((batch, shape, cache, queries * 100))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_what_lies_beyond_a_context_is_not_even_read(dtype):
    """NaN in the rest of the last block, and in blocks that only pad the table, changes nothing."""
    batch, shape, cache, queries = case([(1, 5), (2, 33)], dtype=dtype)
    expected = attend(NativeAttention, batch, shape, cache, queries)
    slots = cache.layers[0].view(len(cache.layers[0]), cache.block_size, -1)
    slots[batch.block_tables[0, 1], 1:] = torch.nan
    slots[batch.block_tables[1, 8], 1:] = torch.nan
    slots[batch.block_tables[0, 2:]] = torch.nan
    got = attend(NativeAttention, batch, shape, cache, queries)
    assert torch.equal(got, expected) and got.isfinite().all()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_a_request_that_is_not_finite_harms_no_other(dtype):
    batch, shape, cache, queries = case([(1, 40), (1, 40), (3, 20)], dtype=dtype)
    expected = attend(NativeAttention, batch, shape, cache, queries)
    cache.layers[0][batch.block_tables[1, 3]] = torch.nan
    got = attend(NativeAttention, batch, shape, cache, queries)
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2, 3, 4]], expected[[0, 2, 3, 4]])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("rows, width", [(1, 8), (3, 50), (40, 576)])
def test_norm_and_activation_equal_pytorchs(rows, width, dtype):
    torch.manual_seed(0)
    hidden, delta, gate_up = (torch.randn(rows, n).mul(8).to(dtype) for n in (width, width, 2 * width))
    for added in (None, delta):
        theirs, ours = hidden.clone(), hidden.clone()
        expected, got = TorchKernels.add_norm(theirs, added, 1e-5), NativeKernels.add_norm(ours, added, 1e-5)
        assert torch.equal(ours, theirs)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=TOLERANCES[dtype])
    expected, got = TorchKernels.silu_mul(gate_up.float()), NativeKernels.silu_mul(gate_up)
    torch.testing.assert_close(got.float(), expected, atol=1e-6, rtol=TOLERANCES[dtype])


def test_extreme_numbers_come_through_an_activation():
    gate = torch.tensor([[0.0, -0.0, 1e30, -1e30, 90.0, -90.0, torch.inf, torch.nan]])
    expected = TorchKernels.silu_mul(torch.cat([gate, torch.ones_like(gate)], 1))
    torch.testing.assert_close(
        NativeKernels.silu_mul(torch.cat([gate, torch.ones_like(gate)], 1)),
        expected,
        equal_nan=True,
        atol=1e-30,
        rtol=1e-6,
    )


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_rotation_and_cache_equal_pytorchs(dtype, qk_norm):
    torch.manual_seed(0)
    shape = config(6, 2, 16)
    qkv, slots = torch.randn(9, 10, 16).to(dtype), torch.randperm(40)[:9]
    norms = (torch.randn(16).to(dtype), torch.randn(16).to(dtype)) if qk_norm else None
    positions, frequencies = torch.randint(0, 3000, (9,)), torch.rand(8)
    made = []
    for kernels in (TorchKernels, NativeKernels):
        cache, rows = KVCache(shape, 10, 4, dtype, "cpu"), qkv.clone()
        cache.begin_step(9)
        rope = kernels.rope(positions, frequencies, 1.3, dtype)
        kernels.rotate_and_store(rows, rope, norms, 1e-5, cache, 0, slots)
        assert cache.is_finite().all()
        made.append((rows[:, :8].float(), cache.layers[0].float(), cache.written_sums))
    for expected, got in zip(*made, strict=True):
        torch.testing.assert_close(got, expected, atol=4 * TOLERANCES[dtype], rtol=4 * TOLERANCES[dtype])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_keys_and_values_that_are_not_finite_are_told(dtype, value):
    cache, qkv = KVCache(config(2, 1, 8), 4, 4, dtype, "cpu"), torch.ones(3, 4, 8, dtype=dtype)
    qkv[1, 3, 5] = value
    cache.begin_step(3)
    rope = NativeKernels.rope(torch.arange(3), torch.rand(4), 1.0, dtype)
    NativeKernels.rotate_and_store(qkv, rope, None, 1e-5, cache, 0, torch.arange(3))
    assert cache.is_finite().tolist() == [True, False, True]


@pytest.mark.skipif(not HAS_AMX, reason="this processor has no AMX")
@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 31, 32, 33, 49, 97])
def test_amx_products_equal_pytorchs(rows):
    """Of whole tiles of rows, and of parts of them; before and after rounding."""
    torch.manual_seed(0)
    for outputs, inputs in ((32, 32), (96, 64), (1120, 576)):
        weight, x = torch.randn(outputs, inputs).bfloat16(), torch.randn(rows, inputs).bfloat16()
        for bias in (None, torch.randn(outputs).bfloat16()):
            layer = AmxLinear(weight, bias)
            expected = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
            torch.testing.assert_close(layer.in_float32(x), expected, atol=1e-3, rtol=1e-4)
            assert torch.equal(layer(x), layer.in_float32(x).bfloat16())


@pytest.mark.skipif(not HAS_AMX, reason="this processor has no AMX")
def test_amx_is_for_whole_tiles_of_bfloat16():
    assert AmxLinear.fits(torch.zeros(64, 32, dtype=torch.bfloat16))
    for other in (torch.zeros(64, 32), torch.zeros(48, 32).bfloat16(), torch.zeros(64, 40).bfloat16()):
        assert not AmxLinear.fits(other)


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_every_family_equals_it_by_pytorchs_kernels(name):
    """Chunks and decode rows in any order within a batch."""
    rng = random.Random(name)
    reference = tiny_reference(name)
    drivers = [
        Driver(tiny_model(reference), attention=AttentionMetadata),
        Driver(tiny_model(reference, kernels=NativeKernels), attention=NativeAttention),
    ]
    prompts = {r: [rng.randrange(100) for _ in range(n)] for r, n in enumerate((3, 30, 9))}
    batches = [prompts, {0: [5], 1: [6], 2: [7]}, {1: [8], 0: [9, 10]}, {2: [11, 12], 0: [13]}]
    for batch in batches:
        expected, got = (driver.step(batch) for driver in drivers)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_the_engine_gives_the_same_tokens_by_either():
    prompts = [[1, 2, 3], [7] * 20, [250]]
    for kernels in ("torch", "native"):
        llm = LLM(str(tiny_folder()), kernels=kernels, num_blocks=64)
        assert (llm.engine._runner._attention is NativeAttention) == (kernels == "native")
        for prompt, output in zip(prompts, llm.generate(prompts, greedy(8), use_tqdm=False), strict=True):
            assert_solo(prompt, output.outputs[0].token_ids)


def test_several_threads_compute_what_one_does():
    torch.manual_seed(0)
    given = case(RAGGED, dtype=torch.bfloat16)
    most = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(attend(NativeAttention, *given))
    finally:
        torch.set_num_threads(most)
    assert torch.equal(*results)


def test_auto_takes_them_where_they_can_be_had():
    assert choose_kernels("auto", torch.float32, CPU) is NativeKernels
    assert choose_kernels("torch", torch.float32, CPU) is TorchKernels
    assert choose_kernels("auto", torch.float16, CPU) is TorchKernels
    assert choose_kernels("auto", torch.bfloat16, torch.device("cuda")) is TorchKernels
    with pytest.raises(
        ValueError, match=r"native.*float32 and bfloat16 on a CPU, not for torch.float16.*torch"
    ):
        choose_kernels("native", torch.float16, CPU)
    with pytest.raises(ValueError, match="unknown kernels 'fast'; choose one of auto, torch, native"):
        LLM(str(tiny_folder()), kernels="fast")
    loaded = tiny_loaded()
    for kernels, attention in ((NativeKernels, NativeAttention), (TorchKernels, AttentionMetadata)):
        assert choose_attention("auto", loaded.config, torch.float32, CPU, kernels) is attention
    assert choose_attention("sdpa", loaded.config, torch.float32, CPU, NativeKernels) is AttentionMetadata
    with pytest.raises(ValueError, match="kernels"):
        LLM.from_loaded(loaded, kernels="torch")


@pytest.fixture
def fresh_library(monkeypatch, tmp_path):
    """The kernels are not loaded yet, and nothing is kept."""
    monkeypatch.setenv("GLASS_ENGINE_CACHE", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(native, "_library", build.load_library)
    native.has_amx.cache_clear()
    yield tmp_path
    native.has_amx.cache_clear()


@pytest.mark.parametrize(
    "compiler, cause",
    [(None, r"no C\+\+ compiler"), ("/bin/false", "cannot compile"), ("/nowhere/c++", "No such file")],
)
def test_without_a_compiler_that_works_pytorch_computes(fresh_library, monkeypatch, compiler, cause):
    if compiler is None:
        monkeypatch.setenv("PATH", "")
    else:
        monkeypatch.setenv("CXX", compiler)
    assert choose_kernels("auto", torch.float32, CPU) is TorchKernels
    with pytest.raises(ValueError, match=f'{cause}.*kernels="torch" works everywhere'):
        LLM(str(tiny_folder()), kernels="native")
    assert not list(fresh_library.iterdir())


def test_compiled_once_kept_and_mended_when_damaged(fresh_library, monkeypatch):
    native.has_amx()
    (kept,) = fresh_library.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(build, "compile_library", lambda *_: pytest.fail("compiled again"))
        build.load_library()
    monkeypatch.setattr(build, "FLAGS", [*build.FLAGS, "-DOTHER"])  # another name: this file was never loaded
    other = build.library_file(build.find_compiler())
    other.write_bytes(b"damaged")
    build.load_library()
    assert other.stat().st_size == pytest.approx(kept.stat().st_size, rel=0.1)
