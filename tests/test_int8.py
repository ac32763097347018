"""int8 weights: the product's error is small and stays in its row; the engine is as sound as without them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from engine.model import load_model
from engine.model.linear import Int8Linear, PlainLinear, choose_linear, works
from tests.support import greedy, tiny_folder, tiny_llm

DTYPES = [torch.float32, torch.bfloat16]
CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(
    not works(Int8Linear, torch.float32, tolerance=0.02),
    reason="this CPU or build of PyTorch has no 8-bit products",
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 33])
@pytest.mark.parametrize("biased", [False, True])
def test_product_is_close(dtype, tokens, biased):
    torch.manual_seed(0)
    weight, x = torch.randn(48, 80, dtype=dtype), torch.randn(tokens, 80, dtype=dtype)
    bias = torch.randn(48, dtype=dtype) if biased else None
    got, expected = Int8Linear(weight, bias)(x), F.linear(x, weight, bias)
    assert got.dtype == dtype and got.shape == expected.shape
    torch.testing.assert_close(got, expected, atol=0.06 * 80**0.5, rtol=0)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_zero_rows_and_outliers_stay_finite(dtype):
    """CASES 77."""
    torch.manual_seed(0)
    weight, x = torch.randn(8, 16, dtype=dtype), torch.randn(4, 16, dtype=dtype)
    weight[3] = 0
    weight[:, 5] = 0
    x[1] = 0
    x[2, 7] = 3e4
    got = Int8Linear(weight)(x)
    assert got.isfinite().all()
    assert (got[1] == 0).all() and (got[:, 3] == 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_says_so_and_harms_no_other(bad):
    torch.manual_seed(0)
    layer, x = Int8Linear(torch.randn(8, 16)), torch.randn(3, 16)
    alone = layer(x)
    x[1, 4] = bad
    got = layer(x)
    assert not got[1].isfinite().any()
    assert torch.equal(got[[0, 2]], alone[[0, 2]])


def test_a_row_does_not_depend_on_its_batch():
    torch.manual_seed(0)
    layer, x = Int8Linear(torch.randn(48, 80)), torch.randn(40, 80)
    whole = layer(x)
    assert all(torch.equal(layer(x[i : i + 1])[0], whole[i]) for i in range(40))


def test_products_that_saturate_do_not_count_as_working():
    class Saturating:
        """Adds up pairs of unsigned and signed products in 16 bits, as processors without VNNI do."""

        def __init__(self, weight, bias):
            self.scale, self.bias = weight.abs().amax(1) / 127, bias
            self.weight = (weight / self.scale.unsqueeze(1)).round()

        def __call__(self, x):
            scale = x.abs().amax(1, keepdim=True) / 127
            products = ((x / scale).round() + 128).unsqueeze(1) * self.weight
            pairs = products.unflatten(-1, (-1, 2)).sum(-1).clamp(-(2**15), self.largest)
            return (pairs.sum(-1) - 128 * self.weight.sum(-1)) * self.scale * scale + self.bias

    Saturating.largest = 2**31 - 1
    assert works(Saturating, torch.float32, tolerance=0.02)
    Saturating.largest = 2**15 - 1
    assert not works(Saturating, torch.float32, tolerance=0.02)


def test_where_int8_is_not_to_be_had_it_is_refused_by_name():
    assert choose_linear(torch.float32, CPU, "int8") is Int8Linear
    with pytest.raises(ValueError, match="quantization='int8' needs a CPU"):
        choose_linear(torch.float16, torch.device("cuda"), "int8")
    with pytest.raises(ValueError, match="quantization: the model is loaded already"):
        tiny_llm(quantization="int8")


def test_engine_with_int8_weights_gives_everyone_what_they_get_alone():
    loaded = load_model(str(tiny_folder()), dtype="float32", quantization="int8")
    assert not any(isinstance(module, PlainLinear) for module in loaded.model.modules())
    assert loaded.name.endswith("(int8)")
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6], [5] * 20, [3, 1, 4, 1, 5, 9]]
    alone = [tiny_llm(loaded).generate([prompt], greedy(24), use_tqdm=False)[0] for prompt in prompts]
    together = tiny_llm(loaded).generate(prompts, greedy(24), use_tqdm=False)
    for one, other in zip(alone, together, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
