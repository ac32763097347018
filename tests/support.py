"""What the engine's tests share: a tiny random model in a real folder, and its reference."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from engine import LLM, RequestOutput, SamplingParams
from engine.events import Keyframe, Replica, StepEvent
from engine.model import LoadedModel, load_model

BOS, EOS = "<|bos|>", "<|eos|>"
EOS_ID = 257
NUM_TOKENS = 258  # 256 bytes and two special tokens
VOCAB_SIZE = 272  # the rest is padding that no tokenizer knows
TIE = 1e-3  # a first difference counts only if the reference's best two logits are further apart


@functools.cache
def tiny_folder() -> Path:
    """A random byte-level Llama with its tokenizer, as `from_pretrained` likes it."""
    folder = Path(tempfile.mkdtemp(prefix="glass-engine-tiny-"))
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


def tiny_llm(**options) -> LLM:
    """An LLM over the tiny model: 64 blocks of 4 tokens and 4 slots unless told otherwise."""
    defaults = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    return LLM.from_loaded(tiny_loaded(), **(defaults | options))


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
        else:
            outputs[delta.request_id] = delta


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
