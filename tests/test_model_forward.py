"""Logits through the paged cache equal those of transformers, for every family and any packing."""

from __future__ import annotations

import random

import pytest
import torch

from tests.tiny_models import TINY_CONFIGS, Driver, tiny_model, tiny_reference


@torch.inference_mode()
def reference_logits(reference, tokens: list[int]) -> torch.Tensor:
    return reference(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_logits_equal_transformers_in_mixed_chunks_and_decode(name):
    """Six ragged requests, past the original context of the rope variants, in random odd grants."""
    rng = random.Random(name)
    reference = tiny_reference(name)
    driver = Driver(tiny_model(reference))
    prompts = {r: [rng.randrange(100) for _ in range(n)] for r, n in enumerate((1, 7, 90, 33, 16, 60))}
    expected = {r: reference_logits(reference, prompt) for r, prompt in prompts.items()}
    while True:
        left = {r: len(p) - driver.computed.get(r, 0) for r, p in prompts.items()}
        parts, wanted = {}, {}
        for r in rng.sample(sorted(prompts), len(prompts)):
            grant = min(left[r], rng.choice((0, 1, 1, 3, 13, 31)))
            if grant:
                done = driver.computed.get(r, 0)
                parts[r] = prompts[r][done : done + grant]
                wanted[r] = rng.choice((0, 1, grant))
        if not any(left.values()):
            break
        if parts:
            logits = driver.step(parts, wanted)
            ends = [(r, driver.computed[r] - wanted[r], driver.computed[r]) for r in parts]
            target = torch.cat([expected[r][start:stop] for r, start, stop in ends])
            assert logits.dtype == torch.float32 and logits.shape == target.shape
            torch.testing.assert_close(logits, target, atol=1e-4, rtol=1e-4)
