"""From logits to the next tokens: all rows of a step at once, each by its own request's rules.

A row's result depends on nothing but its logits, its parameters and its own random numbers. Batch
mates change neither: every row draws exactly one uniform number per token, from its request's own
generator, and inverts the cumulative distribution at that point.

On a GPU nothing here is read back: what was chosen stays there until the step's one copy to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.request import Request
from engine.sampling_plan import SamplingPlan, plan_sampling

PART = 128  # tokens of the vocabulary
FIRST_CANDIDATES = 512  # top_p looks at this many tokens before it sorts the whole vocabulary


class TokenLogprob(NamedTuple):
    token_id: int
    logprob: float
    rank: int  # 1 is the likeliest


class Sample(NamedTuple):
    """A row's next token, and its log-probabilities if they were asked for: the chosen one's first."""

    token_id: int
    logprobs: list[TokenLogprob] | None


class Choice(NamedTuple):
    """What was sampled, on the device: see `Sampler.read`.

    tokens: int64 [S], -1 where nothing can be sampled. reports: float64 [reported rows, 2 + 2 * k], the
    chosen token's log-probability and rank, then the k likeliest tokens' log-probabilities and ids.
    """

    tokens: Tensor
    reports: Tensor


class Sampler:
    """Samples token ids.

    vocab_size: ids from here on are padding of the logits, never sampled. gaps: nor are these below it,
    which the tokenizer does not know.
    """

    def __init__(self, vocab_size: int, gaps: Sequence[int] = (), device: torch.device | str = "cpu"):
        self.vocab_size = vocab_size
        self._gaps = torch.tensor(gaps, dtype=torch.int64, device=device) if gaps else None

    def plan(self, requests: Sequence[Request]) -> SamplingPlan:
        """What these S requests ask for, in row order; on the host, to be taken to the logits' device."""
        return plan_sampling(requests, self.vocab_size)

    @torch.inference_mode()  # as the logits were made: only so may they be changed in place
    def __call__(self, logits: Tensor, plan: SamplingPlan) -> Choice:
        """Choose a token a row; none where a row's logits are not finite, so that nothing can be sampled.

        logits: float32 [S, vocabulary], may be overwritten.
        """
        logits = logits[:, : self.vocab_size]
        # Before anything changes them.
        logprobs = None if plan.reported_rows is None else _pick(logits, plan.reported_rows).log_softmax(-1)
        _apply_bias(logits, plan)
        _apply_penalties(logits, plan)
        _forbid_early_stops(logits, plan)
        if self._gaps is not None:
            logits.index_fill_(1, self._gaps, -torch.inf)
        # NaN and infinity win every comparison, so the largest value tells of any in its row, be it the
        # model's or extreme parameters' doing; -infinity is left where every token is forbidden.
        largest, tokens = _largest(logits)
        if plan.plain_rows is not None and plan.plain is not None:
            uniform, *numbers = plan.plain.float()
            probs = _flatten(_pick(logits, plan.plain_rows), *numbers).softmax(dim=-1)
            tokens.index_copy_(0, plan.plain_rows, _invert_cdf(probs, uniform))
        if plan.ranked_rows is not None and plan.ranked is not None:
            uniform, temperature, min_p, top_k, top_p = plan.ranked.float()
            flattened = _flatten(_pick(logits, plan.ranked_rows), temperature, min_p)
            tokens.index_copy_(0, plan.ranked_rows, _sample_ranked(flattened, uniform, top_k, top_p))
        reports = logits.new_empty(0)
        if logprobs is not None and plan.reported_rows is not None:
            reports = _report(logprobs, tokens.index_select(0, plan.reported_rows), plan.num_reported)
        return Choice(tokens.masked_fill_(~largest.isfinite(), -1), reports)

    @staticmethod
    def read(choice: Choice, plan: SamplingPlan) -> list[Sample | None]:
        """The choice, once it is on the host: a sample a row, None where nothing could be sampled."""
        reports = iter(choice.reports.tolist())
        samples: list[Sample | None] = []
        for token, request in zip(choice.tokens.tolist(), plan.requests, strict=True):
            logprobs = None
            if request.params.logprobs is not None:
                logprobs = _read_report(token, next(reports), request.params.logprobs)
            samples.append(None if token < 0 else Sample(token, logprobs))
        return samples


# -- changing logits, in place ----------------------------------------------------------------------


def _apply_bias(logits: Tensor, plan: SamplingPlan) -> None:
    if plan.bias_places is not None and plan.bias is not None:
        logits.index_put_(tuple(plan.bias_places), plan.bias.float(), accumulate=True)


def _apply_penalties(logits: Tensor, plan: SamplingPlan) -> None:
    """Repetition, presence and frequency penalty, in this order."""
    if plan.penalised_rows is None or plan.penalties is None:
        return
    repetition, presence, frequency = plan.penalties.float()
    part = _pick(logits, plan.penalised_rows)
    known, in_output = _count(plan.known_places, part) > 0, _count(plan.output_places, part)
    repeated = torch.where(part > 0, part / repetition, part * repetition)
    part = torch.where(known, repeated, part)
    part = part - presence * (in_output > 0) - frequency * in_output
    logits.index_copy_(0, plan.penalised_rows, part)


def _count(places: Tensor | None, like: Tensor) -> Tensor:
    """How often each token occurs in each row: float [rows, vocabulary]."""
    counts = torch.zeros_like(like)
    return (
        counts if places is None else counts.index_put_(tuple(places), counts.new_ones(()), accumulate=True)
    )


def _forbid_early_stops(logits: Tensor, plan: SamplingPlan) -> None:
    """Before `min_tokens`, the tokens that would end a request cannot be sampled."""
    if plan.forbidden_places is not None:
        logits.index_put_(tuple(plan.forbidden_places), logits.new_full((), -torch.inf))


def _largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's largest logit, and its place: that of the first, should there be several.

    On a CPU, PyTorch finds values alone four times as fast as with their places: so first the part of a row.
    """
    if not logits.is_cpu or logits.shape[1] % PART or not logits.is_contiguous():
        return logits.max(dim=-1)
    parts = logits.unflatten(1, (-1, PART))
    largest, part = parts.amax(dim=-1).max(dim=-1)
    chosen = parts[torch.arange(len(logits)), part]
    return largest, part * PART + chosen.argmax(dim=-1)


# -- random rows ------------------------------------------------------------------------------------
# Filters apply in this order: temperature, min_p, top_k, top_p.


def _pick(logits: Tensor, rows: Tensor) -> Tensor:
    """These rows; all of them, which is the common case, without a copy."""
    return logits if len(rows) == len(logits) else logits.index_select(0, rows)


def _flatten(logits: Tensor, temperature: Tensor, min_p: Tensor) -> Tensor:
    """Logits at a temperature, those below min_p at -infinity."""
    logits = logits / temperature
    return logits.masked_fill_(logits < logits.amax(dim=-1, keepdim=True) + min_p.log(), -torch.inf)


def _sample_ranked(logits: Tensor, uniform: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Rows with top_k or top_p, which need tokens in order of likelihood: int64 [rows].

    Sorting 50,000 tokens is slow and hardly ever needed: the likeliest few hundred usually hold all that
    the filters keep. Rows where they do not are done again with the whole vocabulary. A GPU sorts all at
    once: finding out which rows need it would make the host wait.
    """
    vocab_size = logits.shape[-1]
    if not logits.is_cpu:
        return _sample_top(logits, uniform, top_k, top_p, vocab_size)[0]
    tokens, complete = _sample_top(logits, uniform, top_k, top_p, min(FIRST_CANDIDATES, vocab_size))
    rows = (~complete).nonzero().squeeze(-1)
    if len(rows):
        tokens[rows] = _sample_top(logits[rows], uniform[rows], top_k[rows], top_p[rows], vocab_size)[0]
    return tokens


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


def _report(logprobs: Tensor, tokens: Tensor, most: int) -> Tensor:
    """`Choice.reports` for log-probabilities float32 [rows, vocabulary] and tokens int64 [rows]."""
    chosen = logprobs.gather(-1, tokens.unsqueeze(-1))
    ranks = 1 + (logprobs > chosen).sum(dim=-1, keepdim=True)
    values, ids = logprobs.topk(most, dim=-1)
    return torch.cat([part.double() for part in (chosen, ranks, values, ids)], dim=-1)


def _read_report(token: int, report: list[float], num_likeliest: int) -> list[TokenLogprob]:
    """A row of `Choice.reports`: the chosen token's log-probability, then those of the likeliest tokens."""
    logprob, rank, *likeliest = report
    values, ids = likeliest[: len(likeliest) // 2], likeliest[len(likeliest) // 2 :]
    others = [TokenLogprob(int(t), value, n) for n, (t, value) in enumerate(zip(ids, values, strict=True), 1)]
    return [TokenLogprob(token, logprob, int(rank)), *others[:num_likeliest]]


def _invert_cdf(probs: Tensor, uniform: Tensor) -> Tensor:
    """The first index whose cumulative probability exceeds `uniform` of the total: int64 [rows]."""
    cumulative = probs.cumsum(dim=-1)
    # Rounding may lift the last kept entry's sum by a hair over what comes after: stay below the total.
    target = (uniform * cumulative[:, -1:]).minimum(cumulative[:, -1:] * (1 - 1e-6))
    # In a row of NaN, whose result nobody uses, the search runs over the end.
    places = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    return places.clamp_(max=probs.shape[-1] - 1)
