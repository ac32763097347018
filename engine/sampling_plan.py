"""What a step's rows ask of the sampler, as tensors: made on the host, before the logits are there.

So it travels to the device with the batch, in one copy, and sampling waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.request import Request

FLOAT_MAX = torch.finfo(torch.float32).max


@dataclass(slots=True)
class SamplingPlan:
    """Tensors are int64 or float64 (see `transfer.upload`), and None where no row asks for the thing.

    Rows are int64, ascending. Places are int64 [2, N]: rows (of the logits, or of the penalised ones) and
    tokens. Columns are float64 [fields, rows, 1], to be broadcast over the vocabulary.
    """

    requests: Sequence[Request]
    bias_places: Tensor | None = None
    bias: Tensor | None = None  # float64 [N]
    penalised_rows: Tensor | None = None
    penalties: Tensor | None = None  # columns: repetition, presence, frequency
    known_places: Tensor | None = None  # of every token of prompt and output
    output_places: Tensor | None = None  # of every token of the output
    forbidden_places: Tensor | None = None  # tokens that would end a request before its `min_tokens`
    plain_rows: Tensor | None = None  # drawn from all tokens, in any order
    plain: Tensor | None = None  # columns: a uniform number, temperature, min_p
    ranked_rows: Tensor | None = None  # drawn from the likeliest
    ranked: Tensor | None = None  # columns: the same, then top_k, top_p
    reported_rows: Tensor | None = None  # whose log-probabilities are wanted
    num_reported: int = 0  # the most alternatives that one of them wants


def plan_sampling(requests: Sequence[Request], vocab_size: int) -> SamplingPlan:
    """Draws every row's random number, one a token, from its request's own generator."""
    plan = SamplingPlan(requests)
    _plan_logits(plan, requests, vocab_size)
    plain, ranked = [], []
    for row, request in enumerate(requests):
        params = request.params
        if params.greedy:
            continue
        top_k = min(params.top_k, vocab_size) if params.top_k > 0 else vocab_size
        # Never an infinity, by rounding to float32.
        numbers = [request.rng.random(), min(float(params.temperature), FLOAT_MAX), params.min_p]
        if params.top_p < 1.0 or top_k < vocab_size:
            ranked.append((row, [*numbers, top_k, params.top_p]))
        else:
            plain.append((row, numbers))
    if plain:
        plan.plain_rows, plan.plain = _columns(plain)
    if ranked:
        plan.ranked_rows, plan.ranked = _columns(ranked)
    reported = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
    if reported:
        plan.reported_rows = torch.tensor(reported)
        plan.num_reported = min(max(requests[row].params.logprobs or 0 for row in reported), vocab_size)
    return plan


def _plan_logits(plan: SamplingPlan, requests: Sequence[Request], vocab_size: int) -> None:
    """What changes logits before anything is chosen."""
    biased = [
        (row, token, value)
        for row, request in enumerate(requests)
        for token, value in (request.params.logit_bias or {}).items()
        if token < vocab_size
    ]
    if biased:
        plan.bias_places = torch.tensor([place[:2] for place in biased]).T
        plan.bias = torch.tensor([value for *_, value in biased], dtype=torch.float64)
    forbidden = [
        (row, token)
        for row, request in enumerate(requests)
        if request.num_output_tokens < request.params.min_tokens
        for token in request.stop_tokens
        if token < vocab_size
    ]
    if forbidden:
        plan.forbidden_places = torch.tensor(forbidden).T
    penalised = [
        (row, [p.repetition_penalty, p.presence_penalty, p.frequency_penalty])
        for row, request in enumerate(requests)
        if (p := request.params).has_penalties
    ]
    if penalised:
        plan.penalised_rows, plan.penalties = _columns(penalised)
        theirs = [requests[row] for row, _ in penalised]
        plan.known_places = _places([request.token_ids for request in theirs], vocab_size)
        plan.output_places = _places([request.output_token_ids for request in theirs], vocab_size)


def _columns(numbered: list[tuple[int, list[float]]]) -> tuple[Tensor, Tensor]:
    rows, numbers = zip(*numbered, strict=True)
    return torch.tensor(rows), torch.tensor(numbers, dtype=torch.float64).T.unsqueeze(-1).clamp(max=FLOAT_MAX)


def _places(token_lists: list[list[int]], vocab_size: int) -> Tensor:
    """Of all tokens of all lists; a prompt may hold padding of the vocabulary, which has no logit here."""
    tokens = np.concatenate([np.array(tokens, dtype=np.int64) for tokens in token_lists])
    rows = np.repeat(np.arange(len(token_lists)), [len(tokens) for tokens in token_lists])
    return torch.from_numpy(np.stack([rows, tokens])[:, tokens < vocab_size])
