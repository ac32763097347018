"""The parts of the forward pass alone: linear backends, grouping of requests, the paged cache."""

from __future__ import annotations

import random

import pytest
import torch

from engine.model import attention
from engine.model.attention import group_requests
from engine.model.kv_cache import KVCache
from engine.model.linear import MklLinear, OneDnnLinear, PlainLinear, choose_linear, works
from tests.tiny_models import Driver, tiny_model, tiny_reference

BACKENDS = [(OneDnnLinear, torch.float32), (OneDnnLinear, torch.bfloat16), (MklLinear, torch.float32)]


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
@pytest.mark.parametrize("tokens", [0, 1, 3, 32, 200])
@pytest.mark.parametrize("biased", [False, True])
def test_linear_backends_agree(backend, dtype, tokens, biased):
    if not works(backend, dtype):
        pytest.skip(f"this CPU or build of PyTorch has no {backend.__name__} for {dtype}")
    torch.manual_seed(0)
    weight, x = torch.randn(48, 80, dtype=dtype), torch.randn(tokens, 80, dtype=dtype)
    bias = torch.randn(48, dtype=dtype) if biased else None
    plain, packed = PlainLinear(weight, bias), backend(weight, bias)
    assert packed(x).dtype == dtype and packed(x).shape == (tokens, 48)
    torch.testing.assert_close(packed(x), plain(x))


def test_a_backend_that_is_missing_or_wrong_does_not_count_as_working():
    assert works(PlainLinear, torch.float32)
    assert not works(MklLinear, torch.bfloat16)
    assert not works(lambda weight, bias: PlainLinear(weight + 1, bias), torch.float32)


def test_backend_choice_falls_back_to_plain():
    assert choose_linear(torch.float16, torch.device("cpu")) is PlainLinear
    assert choose_linear(torch.bfloat16, torch.device("cuda")) is PlainLinear


def test_whole_model_agrees_between_backends():
    reference = tiny_reference("qwen2-tied")
    tokens = list(range(40))
    plain, best = (Driver(tiny_model(reference, linear=kind)) for kind in (PlainLinear, None))
    torch.testing.assert_close(best.step({0: tokens}), plain.step({0: tokens}), atol=1e-4, rtol=1e-4)


def test_tied_head_shares_the_embedding_unless_it_must_be_packed():
    model = tiny_model(tiny_reference("llama-tied"), linear=PlainLinear)
    assert model.head.weight.data_ptr() == model.embedding.data_ptr()


def test_a_step_that_wants_no_logits_still_fills_the_cache():
    reference = tiny_reference("llama")
    driver = Driver(tiny_model(reference))
    assert driver.step({0: list(range(10))}, {0: 0}).shape == (0, 100)
    with torch.inference_mode():
        expected = reference(torch.arange(11).unsqueeze(0)).logits[0, -1:]
    torch.testing.assert_close(driver.step({0: [10]}), expected, atol=1e-4, rtol=1e-4)


def test_grouping_covers_every_request_once_with_equal_query_lengths():
    rng = random.Random(0)
    for _ in range(200):
        query_lens = [rng.choice((1, 1, 1, 4, 9)) for _ in range(rng.randint(1, 40))]
        context_lens = [n + rng.choice((0, 30, 700, 3000)) for n in query_lens]
        groups = group_requests(query_lens, context_lens, split_saves=512, most_gathered=4000)
        assert sorted(r for group in groups for r in group) == list(range(len(query_lens)))
        assert all(len({query_lens[r] for r in group}) == 1 for group in groups)
        gathered = [len(group) * max(context_lens[r] for r in group) for group in groups]
        assert all(tokens <= 4000 or len(group) == 1 for tokens, group in zip(gathered, groups, strict=True))


def test_grouping_splits_only_where_it_pays():
    assert group_requests([1] * 4, [90, 96, 80, 100], 512, 10_000) == [[0, 1, 2, 3]]
    assert group_requests([1] * 4, [90, 4000, 80, 4010], 512, 10_000) == [[2, 0], [1, 3]]
    assert group_requests([5, 1, 5], [5, 10, 5], 512, 10_000) == [[1], [0, 2]]
    assert group_requests([1] * 4, [90, 96, 80, 100], 512, 250) == [[2, 0], [1, 3]]


def test_groups_of_one_query_length_give_the_same_logits(monkeypatch):
    """Splitting is only about speed: forced into many groups, a decode step must not change."""
    reference = tiny_reference("llama")
    prompts = {r: list(range(1, 2 + 9 * r)) for r in range(6)}
    results = []
    for split_saves in (0, 512):
        monkeypatch.setattr(attention, "SPLIT_SAVES", {"cpu": split_saves, "cuda": split_saves})
        driver = Driver(tiny_model(reference))
        driver.step(prompts)
        results.append(driver.step({r: [50 + r] for r in prompts}))
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


def test_cache_has_a_dummy_block_and_knows_its_size():
    config = tiny_model(tiny_reference("llama")).config
    cache = KVCache(config, num_blocks=5, block_size=4, dtype=torch.float32, device="cpu")
    assert cache.dummy_block == 5 and all(len(layer) == 6 for layer in cache.layers)
    size = sum(layer[0].numel() * layer.element_size() for layer in cache.layers)
    assert KVCache.bytes_per_block(config, 4, torch.float32) == size
    with pytest.raises(ValueError, match="num_blocks=0"):
        KVCache(config, num_blocks=0, block_size=4, dtype=torch.float32, device="cpu")


def test_cleared_blocks_no_longer_poison_what_shares_them():
    """Masked slots have weight 0, but 0 * inf is NaN: blocks of an overflowed request must be cleared."""
    driver = Driver(tiny_model(tiny_reference("llama")))
    for layer in driver.cache.layers:
        layer[:] = torch.inf
    driver.cache.clear(list(range(driver.num_blocks)))
    assert driver.step({0: [1, 2, 3]}).isfinite().all()
