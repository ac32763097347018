"""The engine: add requests, step, take what comes out.

A step is one flow through five stages, timed one by one:

    schedule -> prepare -> forward -> sample -> postprocess, and one event says what happened.

The engine is not thread-safe: one thread steps it (`EngineRunner` gives it one).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from engine.config import EngineConfig, check_mode
from engine.detokenizer import make_decoder
from engine.events import EngineInfo, EventBus, LifecycleKind, Mode, Phase, SlotUse, StepTimes
from engine.journal import Journal
from engine.memory import ROOT, BlockPool
from engine.model import LoadedModel
from engine.model_runner import ModelRunner
from engine.outputs import CompletionOutput, EngineStats, Logprob, RequestMetrics, RequestOutput
from engine.request import Request, RequestStatus
from engine.request_factory import RequestFactory
from engine.sampler import Choice, Sample, Sampler
from engine.sampling_params import SamplingParams
from engine.scheduler import Grant, Scheduler
from engine.sizing import choose_num_blocks, context_limit
from engine.threads import ComputeThreads, release_team
from engine.transfer import download, mark_time, upload

logger = logging.getLogger(__name__)


class ContinuousEngine:
    """Scheduler, model runner, sampler and event bus, stepped together.

    Raises ValueError if the configuration does not suit the model.
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig):
        self.mode: Mode = config.mode
        self.driver: threading.Thread | None = None  # an EngineRunner's: only it may step this engine
        self.tokenizer = loaded.tokenizer
        self._decode = make_decoder(loaded.tokenizer)
        self.weights = loaded.weights  # how they are stored: a dtype, or a kind of quantization
        self._device = loaded.device
        self._team = ComputeThreads().team if loaded.device.type == "cpu" else contextlib.nullcontext
        num_blocks = choose_num_blocks(loaded, config)
        self.info = EngineInfo(
            model=loaded.name,
            dtype=str(loaded.dtype).removeprefix("torch."),
            device=loaded.device.type,
            block_size=config.block_size,
            num_blocks=num_blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            context_limit=context_limit(loaded, config, num_blocks),
        )
        # The tokenizer may know fewer ids than the model has logits: the rest is padding, never sampled.
        known = {id for id in loaded.tokenizer.get_vocab().values() if id < loaded.config.vocab_size}
        self._factory = RequestFactory(loaded, self.info.context_limit, known, config.seed)
        self._pool = BlockPool(num_blocks, config.block_size)
        self._scheduler = Scheduler(self._pool, self.info, config.mode, config.enable_prefix_caching)
        self._runner = ModelRunner(loaded, config, num_blocks, self.info.context_limit)
        gaps = [id for id in range(max(known)) if id not in known]
        self._sampler = Sampler(max(known) + 1, gaps, loaded.device)
        self.events = EventBus(self.info, config.mode, time.monotonic())
        self._journal = Journal(self.events, self._scheduler)
        self._groups: dict[str, list[Request]] = {}  # request id -> its n continuations, till all are done
        self._ids_in_use: set[str] = set()  # of every continuation in `_groups`, those that are done too
        self._counts: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()  # by finish_reason
        release_team()  # the steps may be another thread's

    @property
    def is_driven(self) -> bool:
        """An `EngineRunner` steps this engine on its thread."""
        return self.driver is not None

    def _check_thread(self) -> None:
        if self.driver not in (None, threading.current_thread()):
            raise RuntimeError("an EngineRunner drives this engine: use the runner's methods")

    # -- requests in and out ----------------------------------------------------------------------

    def make_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        priority: int = 0,
    ) -> Request:
        """Check a request without queueing it; any thread may. Raises ValueError naming what is wrong."""
        return self._factory.make(
            request_id, prompt, SamplingParams() if params is None else params, priority
        )

    def enqueue(self, request: Request) -> None:
        """Put a request and its group into the waiting queue. Raises ValueError if an id is in use.

        This and all below that change the engine raise RuntimeError on any thread but its `EngineRunner`'s.
        """
        self._check_thread()
        for member in request.group:
            if member.request_id in self._ids_in_use:
                raise ValueError(f"request id {member.request_id!r} is in use by an unfinished request")
        self._groups[request.request_id] = request.group
        self._counts["prompt_tokens"] += request.num_prompt_tokens
        for member in request.group:
            self._ids_in_use.add(member.request_id)
            self._scheduler.waiting.push(member)
            self._journal.note("submitted", member, num_tokens=member.num_prompt_tokens)
        self._journal.publish()

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        priority: int = 0,
    ) -> Request:
        """Check and queue a request; lower `priority` goes first.

        Raises ValueError naming the field or the limit, RuntimeError if an `EngineRunner` steps this engine
        on its thread; then nothing was queued.
        """
        if self.is_driven:
            raise RuntimeError("an EngineRunner drives this engine: use its submit()")
        request = self.make_request(request_id, prompt, params, priority)
        self.enqueue(request)
        return request

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now and free its blocks. None if it is unknown or finished already."""
        return self._end_early(request_id, lambda request: self._stop_short(request, "abort"))

    def fail(self, request_id: str, error: str) -> RequestOutput | None:
        """End a request now with finish_reason "error". None if it is unknown or finished already."""
        return self._end_early(request_id, lambda request: self._fail(request, error))

    def has_unfinished(self) -> bool:
        """Somebody waits or runs, so that a step would do something."""
        return bool(self._groups)

    @property
    def unfinished_ids(self) -> list[str]:
        """The ids of requests as they were added; one stays until all of its continuations are done."""
        return list(self._groups)

    def set_mode(self, mode: Mode) -> None:
        """Switch between naive, static and continuous; running requests are requeued with their tokens."""
        check_mode(mode)
        self._check_thread()
        if mode == self.mode:
            return
        self.mode = mode
        for request in self._scheduler.set_mode(mode):
            self._journal.note("preempted", request, reason="mode")
        self._journal.note_mode(mode)
        self._journal.publish()

    def stats(self) -> EngineStats:
        """How many requests, blocks and tokens there are now, and have been since the engine was made."""
        return EngineStats(
            mode=self.mode,
            step=self._journal.step,
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            num_blocks=self._pool.num_blocks,
            num_used_blocks=self._pool.num_used,
            num_cached_blocks=self._pool.num_cached,
            num_free_blocks=self._pool.num_free,
            num_preemptions=self._counts["preemptions"],
            num_prefix_hit_tokens=self._counts["prefix_hit_tokens"],
            num_prompt_tokens=self._counts["prompt_tokens"],
            num_output_tokens=self._counts["output_tokens"],
            num_finished=dict(self._finished),
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless queue, slots, block tables and pool agree."""
        self._scheduler.check_integrity()

    # -- the step ---------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Move every request on by what the scheduler grants it. Returns this step's deltas.

        If computing fails, the requests in the batch end with finish_reason "error"; everybody else,
        the queue and the prefix cache are as if the step had not been.
        """
        self._check_thread()
        if not self.has_unfinished():
            return []
        with self._team():
            outputs = self._step()
        if not self.has_unfinished():
            release_team()
        return outputs

    def _step(self) -> list[RequestOutput]:
        self._journal.step += 1
        marks = [time.monotonic()]
        schedule = self._scheduler.schedule()
        self._journal.note_schedule(schedule)
        for request in schedule.admitted:
            self._counts["prefix_hit_tokens"] += request.num_computed_tokens
            if not request.was_admitted:
                request.num_cached_tokens = request.num_computed_tokens
        self._counts["preemptions"] += len(schedule.preempted)
        marks.append(time.monotonic())
        slots: list[SlotUse] = []
        # Before anything can fail: who was admitted with a copy counts on it, in this step or a later one.
        self._runner.copy_blocks(schedule.copies)
        try:
            batch = self._runner.prepare(schedule.grants)
            plan = self._sampler.plan([grant.request for grant in schedule.grants if grant.samples])
            upload(self._device, batch, plan)
            marks.append(time.monotonic())
            logits, finite = self._runner.forward(batch)
            when_computed = mark_time(self._device)
            choice = self._sampler(logits, plan)
            self._runner.keep_sampled(plan.requests, choice.tokens)
            finite, *chosen = download(self._device, finite, *choice)
            samples = self._sampler.read(Choice(*chosen), plan)
            broken = self._runner.find_broken(batch.query_lens, finite.tolist())
            marks += [when_computed(), time.monotonic()]
        except Exception as error:
            logger.exception("step %d failed", self._journal.step)
            outputs = [self._fail(grant.request, f"the engine failed: {error}") for grant in schedule.grants]
            marks += [time.monotonic()] * (5 - len(marks))
        else:
            outputs, slots = self._postprocess(schedule.grants, samples, broken)
        marks.append(time.monotonic())
        times = StepTimes(*(end - start for start, end in itertools.pairwise(marks)))
        self._journal.publish_step(self.mode, schedule, slots, times)
        return outputs

    def _postprocess(
        self, grants: list[Grant], samples: list[Sample | None], broken: set[int]
    ) -> tuple[list[RequestOutput], list[SlotUse]]:
        """Book what was computed, append what was sampled, end what is done.

        broken: places in `grants` of the requests whose K or V are not finite.
        """
        sampled = iter(samples)
        outputs: list[RequestOutput] = []
        slots: list[SlotUse] = []
        for place, grant in enumerate(grants):
            request, num_tokens = grant
            slot, is_sampled = request.held_slot, grant.samples
            phase: Phase = "decode" if request.is_decoding else "prefill"
            sample = next(sampled) if is_sampled else None
            if place in broken or (is_sampled and sample is None):
                sample = None
                outputs.append(self._fail(request, "the model's numbers are not finite (NaN or infinity)"))
            else:
                self._book_computed(request, num_tokens)
            if sample is not None:
                outputs.append(self._append_or_fail(request, sample))
            computed, total = request.num_computed_tokens, len(request.token_ids)
            slots.append(
                SlotUse(slot, request.request_id, phase, num_tokens, computed, total, int(sample is not None))
            )
        return outputs, slots

    def _book_computed(self, request: Request, num_tokens: int) -> None:
        """Advance `num_computed_tokens`, note how full the blocks are, index those now full."""
        block_size = self._pool.block_size
        start = request.num_computed_tokens
        end = request.num_computed_tokens = start + num_tokens
        for index in range(start // block_size, -(-end // block_size)):
            self._pool.set_filled(request.block_table[index], min(block_size, end - index * block_size))
        if not self._scheduler.shares_prefixes:
            return
        for index in range(len(request.content_ids), end // block_size):
            parent = request.content_ids[-1] if request.content_ids else ROOT
            tokens = tuple(request.token_ids[index * block_size : (index + 1) * block_size])
            indexed = self._pool.publish(request.request_id, request.block_table[index], parent, tokens)
            request.block_table[index] = indexed.block
            request.content_ids.append(indexed.content_id)

    def _append_or_fail(self, request: Request, sample: Sample) -> RequestOutput:
        """Append an output token; if its text cannot be made, that is the end of this request alone."""
        try:
            return self._append_token(request, sample)
        except Exception as error:
            if request.status is RequestStatus.FINISHED:
                raise
            logger.exception("request %s failed", request.request_id)
            return self._fail(request, f"the engine failed: {error}")

    def _append_token(self, request: Request, sample: Sample) -> RequestOutput:
        """Append an output token and see whether the request ends with it."""
        token, logprobs = sample.token_id, self._logprobs(sample)
        request.token_ids.append(token)
        self._counts["output_tokens"] += 1
        if request.first_token_time is None:
            request.first_token_time = time.monotonic()
            self._journal.note("first_token", request, num_tokens=request.num_prompt_tokens)
        params, detokenizer = request.params, request.detokenizer
        may_stop = request.num_output_tokens >= params.min_tokens
        finish_reason = None
        text, stop_string = "", None
        if may_stop and token in request.stop_tokens:
            finish_reason, request.stop_reason = "stop", request.stop_tokens[token]
            if params.include_stop_str_in_output:
                text, _ = detokenizer.append(token, check_stop=False)
        else:
            text, stop_string = detokenizer.append(token, may_stop)
            if request.num_output_tokens >= request.max_tokens:
                finish_reason = "length"
        if finish_reason and stop_string is None:
            rest, stop_string = detokenizer.flush(may_stop)
            text += rest
        if stop_string is not None:
            finish_reason, request.stop_reason = "stop", stop_string
        if finish_reason:
            self._finish(request, finish_reason)
        return self._output(request, text, [token], logprobs)

    def _logprobs(self, sample: Sample) -> dict[int, Logprob] | None:
        if sample.logprobs is None:
            return None
        return {
            token_id: Logprob(logprob, rank, self._decode([token_id]))
            for token_id, logprob, rank in sample.logprobs
        }

    # -- endings ----------------------------------------------------------------------------------

    def _end_early(self, request_id: str, end: Callable[[Request], RequestOutput]) -> RequestOutput | None:
        """End what is unfinished of a request; one output for all of it."""
        self._check_thread()
        whole: RequestOutput | None = None
        for request in list(self._groups.get(request_id, ())):
            if request.status is not RequestStatus.FINISHED:
                output = end(request)
                if whole is None:
                    whole = output
                else:
                    whole.extend(output)
        self._journal.publish()
        return whole

    def _fail(self, request: Request, error: str) -> RequestOutput:
        request.error = error
        # Blocks it had computed are sound, and perhaps cached; the one it was writing belongs to it alone.
        self._runner.scrub(request.block_table[request.num_computed_tokens // self._pool.block_size :])
        return self._stop_short(request, "error")

    def _stop_short(self, request: Request, reason: str) -> RequestOutput:
        """End a request that is not done; text that was held back is still given out."""
        try:
            text, _ = request.detokenizer.flush(check_stop=False)
        except Exception:  # the tokenizer's; the request must end all the same
            logger.exception("the text that request %s held back is lost", request.request_id)
            text = ""
        self._finish(request, reason)
        return self._output(request, text, [])

    def _finish(self, request: Request, reason: str) -> None:
        request.finish_reason = reason
        request.finish_time = time.monotonic()
        self._finished[reason] += 1
        kind: LifecycleKind = "aborted" if reason == "abort" else "finished"
        self._journal.note(kind, request, num_tokens=request.num_output_tokens, reason=reason)
        self._scheduler.remove(request)
        if all(member.status is RequestStatus.FINISHED for member in request.group):
            del self._groups[request.leader.request_id]
            self._ids_in_use.difference_update(member.request_id for member in request.group)

    def _output(
        self, request: Request, text: str, token_ids: list[int], logprobs: dict[int, Logprob] | None = None
    ) -> RequestOutput:
        """A delta: what is new, and how the request stands."""
        group = request.group
        finished = all(member.status is RequestStatus.FINISHED for member in group)
        completion = CompletionOutput(
            request.index, text, token_ids, request.finish_reason, request.stop_reason
        )
        if request.params.logprobs is not None:
            completion.logprobs = [logprobs] if logprobs is not None else []
        return RequestOutput(
            request_id=request.leader.request_id,
            prompt_token_ids=request.prompt_token_ids,
            num_cached_tokens=request.leader.num_cached_tokens or 0,
            outputs=[completion],
            finished=finished,
            metrics=RequestMetrics(
                request.leader.arrival_time,
                min((m.first_token_time for m in group if m.first_token_time is not None), default=None),
                request.finish_time if finished else None,
                sum(member.num_preemptions for member in group),
            ),
            error=request.error,
        )
