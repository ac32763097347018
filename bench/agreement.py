"""How often a model in another dtype, or with quantized weights, would choose the token that float32 chooses.

The float32 model answers greedily; the other is then asked, at every position of those answers, for the next
token after the very same text. So one deviation does not count again and again, as it would if both wrote
freely. A share of the positions is a coin toss between two nearly equal logits, in float32 too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import plotly.graph_objects as go

from bench.report import Report, setting
from engine import LLM, SamplingParams
from engine.model import LoadedModel, load_model

PROMPTS = (
    "The capital of France is",
    "Explain photosynthesis in simple words.",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n",
    "The three laws of motion are",
    "List five uses of a paperclip:",
    "What is the difference between a list and a tuple in Python?",
    "In the year 2050, most people",
    "Dear customer, thank you for your letter of",
    "Water boils at",
    "Q: Who wrote Faust?\nA:",
    "1, 1, 2, 3, 5, 8, 13,",
)


class Agreement(NamedTuple):
    """`num_same` of `num_positions` next tokens are the same."""

    num_same: int
    num_positions: int

    @property
    def share(self) -> float:
        return self.num_same / self.num_positions


def top1_agreement(
    reference: LLM, other: LLM, prompts: Sequence[str] = PROMPTS, num_tokens: int = 64
) -> Agreement:
    """Compare `other` with `reference` over num_tokens positions after each prompt."""
    answers = reference.generate(prompts, _greedy(num_tokens), use_tqdm=False)
    texts, wanted = [], []
    for answer in answers:
        tokens = answer.outputs[0].token_ids
        for position, token in enumerate(tokens):
            texts.append(answer.prompt_token_ids + tokens[:position])
            wanted.append(token)
    chosen = other.generate(texts, _greedy(1), use_tqdm=False)
    same = sum(output.outputs[0].token_ids == [token] for output, token in zip(chosen, wanted, strict=True))
    return Agreement(same, len(wanted))


def measure_agreement(loaded: LoadedModel, facts: dict[str, Any]) -> Report:
    """A model's agreement with its own weights in float32, as a report."""
    options: dict[str, Any] = {
        "max_num_seqs": 32,
        "max_model_len": 256,
        "num_blocks": 1024,
        "enable_prefix_caching": False,
    }
    reference = load_model(str(loaded.path), dtype="float32", device=loaded.device.type, kernels="torch")
    found = top1_agreement(LLM.from_loaded(reference, **options), LLM.from_loaded(loaded, **options))
    lines = [
        *setting(facts),
        f"Weights in {loaded.weights}: the next token is float32's at {found.num_same} of "
        f"{found.num_positions} positions, {100 * found.share:.1f} %.",
    ]
    return Report("\n".join(lines), facts | {"agreement": found._asdict()}, go.Figure)


def _greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
