"""From logits to the next tokens: all rows of a step at once, each by its own request's rules.

A row's result depends on nothing but its logits, its parameters and its own random numbers. Batch
mates change neither: every row draws exactly one uniform number per token, from its request's own
generator, and inverts the cumulative distribution at that point.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.request import Request

FLOAT_MAX = torch.finfo(torch.float32).max
FIRST_CANDIDATES = 512  # top_p looks at this many tokens before it sorts the whole vocabulary


class TokenLogprob(NamedTuple):
    token_id: int
    logprob: float
    rank: int  # 1 is the likeliest


class Sample(NamedTuple):
    """A row's next token, and its log-probabilities if they were asked for: the chosen one's first."""

    token_id: int
    logprobs: list[TokenLogprob] | None


class Sampler:
    """Samples token ids. `vocab_size`: ids from here on are padding of the logits, never sampled."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    @torch.inference_mode()  # as the logits were made: only so may they be changed in place
    def __call__(self, logits: Tensor, requests: Sequence[Request]) -> list[Sample | None]:
        """One sample a row; None where a row's logits are not finite, so that nothing can be sampled.

        logits: float32 [S, vocabulary], may be overwritten. requests: the S requests, in row order.
        """
        logits = logits[:, : self.vocab_size]
        reported = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
        logprobs = logits[reported].log_softmax(dim=-1) if reported else None  # before anything changes them
        self._apply_bias(logits, requests)
        self._apply_penalties(logits, requests)
        self._forbid_early_stops(logits, requests)
        # NaN and infinity win every comparison, so the largest value tells of any in its row, be it the
        # model's or extreme parameters' doing; -infinity is left where every token is forbidden.
        largest, tokens = logits.max(dim=-1)
        usable = largest.isfinite().tolist()
        rows = [row for row, request in enumerate(requests) if usable[row] and not request.params.greedy]
        if rows:
            tokens[rows] = self._sample_random(logits[rows], [requests[row] for row in rows])
        reports: dict[int, list[TokenLogprob]] = {}
        if logprobs is not None:
            most = max(requests[row].params.logprobs or 0 for row in reported)
            reports = dict(zip(reported, _report(logprobs, tokens[reported], most), strict=True))
        samples: list[Sample | None] = []
        for row, (token, request) in enumerate(zip(tokens.tolist(), requests, strict=True)):
            report = (
                reports[row][: 1 + request.params.logprobs] if request.params.logprobs is not None else None
            )
            samples.append(Sample(token, report) if usable[row] else None)
        return samples

    # -- changing logits --------------------------------------------------------------------------

    @staticmethod
    def _apply_bias(logits: Tensor, requests: Sequence[Request]) -> None:
        """Add every request's `logit_bias`, in place."""
        for row, request in enumerate(requests):
            if bias := request.params.logit_bias:
                known = {token: value for token, value in bias.items() if token < logits.shape[-1]}
                logits[row, list(known)] += torch.tensor(list(known.values()), device=logits.device)

    def _apply_penalties(self, logits: Tensor, requests: Sequence[Request]) -> None:
        """Repetition, presence and frequency penalty, in this order, in place."""
        rows = [row for row, request in enumerate(requests) if request.params.has_penalties]
        if not rows:
            return
        penalised = [requests[row] for row in rows]
        part = logits[rows]
        output_counts = self._count([request.output_token_ids for request in penalised], part)
        seen = self._count([request.token_ids for request in penalised], part) > 0
        repetition = self._column(penalised, part, lambda params: params.repetition_penalty)
        presence = self._column(penalised, part, lambda params: params.presence_penalty)
        frequency = self._column(penalised, part, lambda params: params.frequency_penalty)
        repeated = torch.where(part > 0, part / repetition, part * repetition)
        part = torch.where(seen, repeated, part)
        logits[rows] = part - presence * (output_counts > 0) - frequency * output_counts

    @staticmethod
    def _count(token_lists: list[list[int]], like: Tensor) -> Tensor:
        """How often each token occurs in each list: float [rows, vocabulary]."""
        counts = torch.zeros_like(like)
        # A prompt may hold padding of the vocabulary, which has no logit here.
        token_lists = [[token for token in tokens if token < like.shape[-1]] for tokens in token_lists]
        rows = [row for row, tokens in enumerate(token_lists) for _ in tokens]
        tokens = [token for tokens in token_lists for token in tokens]
        index = torch.tensor([rows, tokens], dtype=torch.int64, device=like.device).reshape(2, -1)
        return counts.index_put_((index[0], index[1]), counts.new_ones(()), accumulate=True)

    def _forbid_early_stops(self, logits: Tensor, requests: Sequence[Request]) -> None:
        """Before `min_tokens`, the tokens that would end a request cannot be sampled."""
        for row, request in enumerate(requests):
            if request.num_output_tokens < request.params.min_tokens:
                stops = [token for token in request.stop_tokens if token < self.vocab_size]
                logits[row, stops] = -torch.inf

    # -- random rows ------------------------------------------------------------------------------

    def _sample_random(self, logits: Tensor, requests: list[Request]) -> Tensor:
        """int64 [rows]. Filters apply in this order: temperature, min_p, top_k, top_p."""
        uniform = torch.tensor([[request.rng.random()] for request in requests], device=logits.device)
        logits = logits / self._column(requests, logits, lambda params: params.temperature)
        min_p = self._column(requests, logits, lambda params: params.min_p)
        logits = logits.masked_fill(logits < logits.amax(dim=-1, keepdim=True) + min_p.log(), -torch.inf)
        tokens = torch.empty(len(requests), dtype=torch.int64, device=logits.device)
        ranked = [row for row, request in enumerate(requests) if self._needs_ranks(request)]
        plain = [row for row, request in enumerate(requests) if not self._needs_ranks(request)]
        if plain:
            tokens[plain] = _invert_cdf(logits[plain].softmax(dim=-1), uniform[plain])
        if ranked:
            by_rank = self._sample_ranked(logits[ranked], uniform[ranked], [requests[row] for row in ranked])
            tokens[ranked] = by_rank
        return tokens

    def _needs_ranks(self, request: Request) -> bool:
        return request.params.top_p < 1.0 or self._top_k(request) < self.vocab_size

    def _sample_ranked(self, logits: Tensor, uniform: Tensor, requests: list[Request]) -> Tensor:
        """Rows with top_k or top_p, which need tokens in order of likelihood.

        Sorting 50,000 tokens is slow and hardly ever needed: the likeliest few hundred usually hold
        all that the filters keep. Rows where they do not are done again with the whole vocabulary.
        """
        top_k = torch.tensor([[self._top_k(request)] for request in requests], device=logits.device)
        top_p = self._column(requests, logits, lambda params: params.top_p)
        tokens, complete = _sample_top(logits, uniform, top_k, top_p, min(FIRST_CANDIDATES, self.vocab_size))
        rows = (~complete).nonzero().squeeze(-1)
        if len(rows):
            whole = _sample_top(logits[rows], uniform[rows], top_k[rows], top_p[rows], self.vocab_size)
            tokens[rows] = whole[0]
        return tokens

    def _top_k(self, request: Request) -> int:
        top_k = request.params.top_k
        return min(top_k, self.vocab_size) if top_k > 0 else self.vocab_size

    @staticmethod
    def _column(requests: Sequence[Request], like: Tensor, value: Callable) -> Tensor:
        """One parameter of each request, as a float column [rows, 1]; never an infinity, by rounding."""
        values = [[min(float(value(request.params)), FLOAT_MAX)] for request in requests]
        return torch.tensor(values, dtype=torch.float32, device=like.device)


def _sample_top(
    logits: Tensor, uniform: Tensor, top_k: Tensor, top_p: Tensor, num_candidates: int
) -> tuple[Tensor, Tensor]:
    """Sample among the `num_candidates` likeliest tokens; say for each row whether they were enough."""
    values, ids = logits.topk(num_candidates, dim=-1)
    ranks = torch.arange(num_candidates, device=logits.device)
    within_k = top_k <= num_candidates
    kept = values.masked_fill(ranks >= top_k, -torch.inf)
    # top_p counts probabilities among what top_k left: some of the candidates, or the whole vocabulary.
    total = torch.where(within_k, kept.logsumexp(-1, keepdim=True), logits.logsumexp(-1, keepdim=True))
    probs = (kept - total).exp()
    cumulative = probs.cumsum(dim=-1)
    # The likeliest token is always kept: a top_p below float32's smallest number is 0 here.
    probs = probs.masked_fill((cumulative - probs >= top_p) & (ranks > 0), 0.0)
    chosen = _invert_cdf(probs, uniform)
    unlimited = top_k >= logits.shape[-1]
    complete = within_k | (unlimited & (cumulative[:, -1:] >= top_p)) | (values[:, -1:] == -torch.inf)
    return ids.gather(-1, chosen.unsqueeze(-1)).squeeze(-1), complete.squeeze(-1)


def _report(logprobs: Tensor, tokens: Tensor, most: int) -> list[list[TokenLogprob]]:
    """For each row the chosen token's log-probability, then those of the `most` likeliest tokens.

    logprobs: float32 [rows, vocabulary]; tokens: int64 [rows].
    """
    chosen = logprobs.gather(-1, tokens.unsqueeze(-1))
    ranks = 1 + (logprobs > chosen).sum(dim=-1)
    values, ids = logprobs.topk(min(most, logprobs.shape[-1]), dim=-1)
    columns = (tokens, chosen.squeeze(-1), ranks, values, ids)
    return [
        [TokenLogprob(token, logprob, rank), *map(TokenLogprob, top_ids, top_values, range(1, most + 1))]
        for token, logprob, rank, top_values, top_ids in zip(*(c.tolist() for c in columns), strict=True)
    ]


def _invert_cdf(probs: Tensor, uniform: Tensor) -> Tensor:
    """The first index whose cumulative probability exceeds `uniform` of the total: int64 [rows]."""
    cumulative = probs.cumsum(dim=-1)
    # Rounding may lift the last kept entry's sum by a hair over what comes after: stay below the total.
    target = (uniform * cumulative[:, -1:]).minimum(cumulative[:, -1:] * (1 - 1e-6))
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1)
