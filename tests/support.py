"""What the engine's tests share: a tiny random model in a real folder, and its reference."""

from __future__ import annotations

import atexit
import functools
import random
import shutil
import tempfile
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from engine import LLM, RequestOutput, SamplingParams
from engine.events import Keyframe, Replica, StepEvent
from engine.model import LoadedModel, load_model
from engine.outputs import CompletionOutput

BOS, EOS = "<|bos|>", "<|eos|>"
EOS_ID = 257
NUM_TOKENS = 258  # 256 bytes and two special tokens
VOCAB_SIZE = 272  # the rest is padding that no tokenizer knows
TIE = 1e-3  # a first difference counts only if the reference's best two logits are further apart


@functools.cache
def tiny_folder() -> Path:
    """A random byte-level Llama with its tokenizer, as `from_pretrained` likes it."""
    folder = Path(tempfile.mkdtemp(prefix="glass-engine-tiny-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS, EOS])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS)
    fast.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=256,
        eos_token_id=EOS_ID,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.25)
        model.lm_head.weight[NUM_TOKENS:] = 5.0  # rows that are padding, made likely: never to be sampled
    model.save_pretrained(folder)
    return folder


@functools.cache
def tiny_loaded() -> LoadedModel:
    return load_model(str(tiny_folder()), dtype="float32")


POISON = 200  # the one token on which the poisoned model's numbers overflow


@functools.cache
def poisoned_loaded() -> LoadedModel:
    """The tiny model, but whoever reads the token POISON gets NaN for it."""
    loaded = load_model(str(tiny_folder()), dtype="float32")
    loaded.model.embedding.data[POISON] = torch.nan
    return loaded


def tiny_llm(loaded: LoadedModel | None = None, **options) -> LLM:
    """An LLM over the tiny model: 64 blocks of 4 tokens and 4 slots unless told otherwise."""
    defaults = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    return LLM.from_loaded(loaded or tiny_loaded(), **(defaults | options))


def token_of(char: str) -> int:
    """The tiny tokenizer's token for an ASCII character."""
    (token,) = tiny_loaded().tokenizer(char)["input_ids"]
    return token


@functools.cache
def reference_model(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@functools.cache
def solo(prompt: tuple[int, ...], max_tokens: int, folder: Path | None = None) -> tuple[int, ...]:
    """Greedy output of transformers for one prompt alone, end tokens ignored."""
    folder = folder or tiny_folder()
    model = reference_model(folder)
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(max_tokens):
            logits = model(torch.tensor([ids])).logits[0, -1]
            ids.append(int(logits[:NUM_TOKENS].argmax() if folder == tiny_folder() else logits.argmax()))
    return tuple(ids[len(prompt) :])


def assert_solo(prompt: list[int], output: list[int], folder: Path | None = None) -> None:
    """`output` is what the reference begins with; a first difference in a near-tie is excused."""
    expected = solo(tuple(prompt), len(output), folder)
    for position, (got, want) in enumerate(zip(output, expected, strict=True)):
        if got != want:
            gap = _logit_gap(list(prompt) + list(expected[:position]), got, want, folder or tiny_folder())
            assert gap < TIE, f"token {position} is {got}, not {want} ({gap:.4f} apart)"
            return


def _logit_gap(context: list[int], got: int, want: int, folder: Path) -> float:
    with torch.inference_mode():
        logits = reference_model(folder)(torch.tensor([context])).logits[0, -1]
    return float(logits[want] - logits[got])


@functools.cache
def reference_logits(context: tuple[int, ...]) -> torch.Tensor:
    """What transformers makes of the tiny model's next token, without the padding of the vocabulary."""
    with torch.inference_mode():
        return reference_model(tiny_folder())(torch.tensor([context])).logits[0, -1, :NUM_TOKENS].clone()


class Oracle:
    """Says what a continuation must be, from transformers' logits and the documented rules alone.

    It knows greedy and plain seeded sampling, logit_bias, end tokens, stop strings and max_tokens.
    context_limit: that of the engine, which may cut max_tokens.
    """

    def __init__(
        self, prompt: Sequence[int], params: SamplingParams, index: int = 0, context_limit: int = 512
    ):
        self.prompt, self.params = tuple(prompt), params
        self.max_tokens = min(params.max_tokens, context_limit - len(prompt))
        self._rng = random.Random(f"own {params.seed}:{index}")
        self._stop_tokens = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS_ID,))}

    def check(self, output: CompletionOutput, is_whole: bool = True) -> None:
        """`output` is right as far as it goes, and, if whole, ends where it must."""
        params, tokens = self.params, output.token_ids
        if params.logprobs is not None:
            assert len(output.logprobs) == len(tokens)
        for position, token in enumerate(tokens):
            logits = reference_logits(self.prompt + tuple(tokens[:position]))
            self._check_token(logits.clone(), token)
            if params.logprobs is not None:
                expected = float(logits.log_softmax(-1)[token])
                assert output.logprobs[position][token].logprob == pytest.approx(expected, abs=1e-3)
            text, reason = self._ending(tokens[: position + 1])
            assert reason is None or position == len(tokens) - 1, f"went on after {reason}"
        if is_whole:
            text, reason = self._ending(tokens)
            assert (output.text, output.finish_reason) == (text, reason)
        else:
            whole = tiny_loaded().tokenizer.decode(tokens, skip_special_tokens=True)
            assert whole.startswith(output.text)

    def _check_token(self, logits: torch.Tensor, token: int) -> None:
        for biased, value in self.params.logit_bias.items():
            logits[biased] += value
        if self.params.greedy:
            assert logits.max() - logits[token] < TIE
            return
        drawn, cumulative = self._rng.random(), logits.softmax(-1).cumsum(-1)
        below = float(cumulative[token - 1]) if token else 0.0
        assert below - TIE < drawn < float(cumulative[token]) + TIE

    def _ending(self, tokens: list[int]) -> tuple[str, str | None]:
        """The text, and the finish_reason, None if it is to go on."""
        params = self.params
        if tokens and tokens[-1] in self._stop_tokens:
            return tiny_loaded().tokenizer.decode(tokens[:-1], skip_special_tokens=True), "stop"
        text = tiny_loaded().tokenizer.decode(tokens, skip_special_tokens=True)
        ends = [text.find(stop) + len(stop) for stop in params.stop if stop in text]
        if ends:
            matched = max((s for s in params.stop if text[: min(ends)].endswith(s)), key=len)
            return text[: min(ends) - len(matched)], "stop"
        return text, "length" if len(tokens) >= self.max_tokens else None


def greedy(max_tokens: int, **options) -> SamplingParams:
    """Greedy sampling of exactly max_tokens tokens."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **options)


def run_to_end(llm: LLM, most_steps: int = 10_000) -> dict[str, RequestOutput]:
    """Step until nothing is left; whole outputs by request id."""
    outputs: dict[str, RequestOutput] = {}
    for _ in range(most_steps):
        if not llm.engine.has_unfinished():
            return outputs
        collect(outputs, llm.engine.step())
    raise AssertionError(f"still unfinished after {most_steps} steps: {llm.engine.stats()}")


def collect(outputs: dict[str, RequestOutput], deltas: list[RequestOutput]) -> None:
    for delta in deltas:
        if delta.request_id in outputs:
            outputs[delta.request_id].extend(delta)
        else:  # a copy: it will grow, and the caller still reads the delta
            outputs[delta.request_id] = deepcopy(delta)


def assert_clean(llm: LLM) -> None:
    """Nothing runs, nothing waits, and every block is free or idle."""
    llm.engine.check_integrity()
    stats = llm.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    assert stats.num_cached_blocks + stats.num_free_blocks == stats.num_blocks


class Mirror:
    """Follows an engine by its events alone, and compares with the engine's own books."""

    def __init__(self, llm: LLM):
        self.llm = llm
        reading = llm.engine.events.read()
        assert isinstance(reading.keyframe, Keyframe)
        self.replica = Replica(reading.keyframe)
        self.cursor = reading.cursor

    def check(self) -> None:
        reading = self.llm.engine.events.read(self.cursor)
        assert reading.keyframe is None
        self.cursor = reading.cursor
        for event in reading.events:
            self.replica.apply(event)
            if isinstance(event, StepEvent):
                self.last_step = event
        engine, replica = self.llm.engine, self.replica
        scheduler, pool = engine._scheduler, engine._pool
        slots: list[str | None] = [None] * engine.info.max_num_seqs
        for request in scheduler.running:
            slots[request.slot] = request.request_id
        assert replica.slots == slots
        tables = {r.request_id: r.block_table for r in scheduler.running if r.block_table}
        assert replica.block_tables == tables
        assert [delta.ref_count for delta in replica.blocks] == [
            pool.ref_count(block) for block in range(pool.num_blocks)
        ]
        assert replica.blocks == [pool.view(block) for block in range(pool.num_blocks)]
        live = {r.request_id: r for r in [*scheduler.running, *scheduler.waiting]}
        assert replica.requests.keys() == live.keys()
        for view in replica.requests.values():
            request = live[view.request_id]
            assert view.num_computed == request.num_computed_tokens
            assert view.num_total == len(request.token_ids)
            assert view.num_preemptions == request.num_preemptions
        assert replica.mode == engine.mode
