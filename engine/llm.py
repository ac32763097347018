"""`LLM`: the engine as a library, for whole lists of prompts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from tqdm.auto import tqdm

from engine.config import EngineConfig
from engine.continuous_engine import ContinuousEngine
from engine.model import LoadedModel, load_model
from engine.outputs import RequestOutput
from engine.request_factory import BYTES, encode
from engine.sampling_params import SamplingParams

Prompt = str | Sequence[int]
Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A loaded model and an engine for it.

    model and the other keywords: the fields of `EngineConfig`. progress: called while loading with a
    stage in words and the fraction done, 0 to 1. Raises ValueError naming a bad field or model.
    """

    def __init__(
        self, model: str = "auto", *, progress: Callable[[str, float], None] | None = None, **options
    ):
        config = EngineConfig(model=model, **options)
        loaded = load_model(
            str(config.model),
            dtype=config.dtype,
            device=config.device,
            max_model_len=config.max_model_len,
            quantization=config.quantization,
            kernels=config.kernels,
            progress=progress,
        )
        self._set_up(loaded, config)

    @classmethod
    def from_loaded(cls, loaded: LoadedModel, **options) -> LLM:
        """One more engine, with its own KV cache, over a model that is loaded already.

        Raises ValueError for what was decided when it was loaded: model, dtype, device, quantization,
        kernels.
        """
        if settled := options.keys() & {"model", "dtype", "device", "quantization", "kernels"}:
            raise ValueError(f"{', '.join(sorted(settled))}: the model is loaded already, and keeps its own")
        llm = cls.__new__(cls)
        llm._set_up(loaded, EngineConfig(model=loaded.name, **options))
        return llm

    def _set_up(self, loaded: LoadedModel, config: EngineConfig) -> None:
        self.loaded = loaded
        self.config = config
        self.engine = ContinuousEngine(loaded, config)
        self.tokenizer = loaded.tokenizer
        self.model_path: Path = loaded.path
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue each prompt (text or token ids); outputs in input order.

        sampling_params: one for all, or one a prompt. Raises ValueError before anything is queued if a
        prompt or parameter is refused, and RuntimeError if an `EngineRunner` is stepping this engine, or if
        it has unfinished requests that were added by hand: their outputs would have nowhere to go.
        """
        if self.engine.is_driven:
            raise RuntimeError("an EngineRunner drives this engine: use its submit() instead of generate()")
        if self.engine.has_unfinished():
            raise RuntimeError("the engine has unfinished requests: step it to their end, or abort them")
        prompts = _as_list(prompts)
        if isinstance(sampling_params, Sequence):
            each = list(sampling_params)
        else:
            each = [SamplingParams() if sampling_params is None else sampling_params] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but {len(each)} sampling_params")
        requests = [
            self.engine.make_request(f"llm-{next(self._ids)}", prompt, params)
            for prompt, params in zip(prompts, each, strict=True)
        ]
        try:
            for request in requests:
                self.engine.enqueue(request)
            outputs = self._run(len(requests), use_tqdm)
        finally:  # interrupted: leave the engine as it was found
            for request in requests:
                self.engine.abort(request.request_id)
        return [outputs[request.request_id] for request in requests]

    def chat(
        self,
        conversations: Sequence[dict] | Sequence[Sequence[dict]],
        sampling_params: Params = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer each conversation, a list of `{"role": ..., "content": ...}` messages (or just one).

        Raises ValueError if the model has no chat template, and as `generate` does.
        """
        if not isinstance(conversations, Sequence):
            raise ValueError(f"conversations must be lists of messages, not {conversations!r:.80}")
        if conversations and isinstance(conversations[0], dict):
            conversations = [conversations]  # type: ignore[assignment]
        prompts = [self.chat_prompt(messages) for messages in conversations]  # type: ignore[arg-type]
        return self.generate(prompts, sampling_params, use_tqdm)

    def chat_prompt(self, messages: Sequence[dict]) -> list[int]:
        """The prompt's token ids for a conversation, by the model's own chat template.

        Raises ValueError if there is none, or if it or the tokenizer cannot make anything of the messages.
        """
        if not self.tokenizer.chat_template:
            raise ValueError(
                f"{self.engine.info.model} has no chat template: use generate() with a prompt of your own"
            )
        for message in messages:
            has_body = isinstance(message, dict) and ("content" in message or "tool_calls" in message)
            if not has_body or "role" not in message:
                raise ValueError(f"a message must have a role and a content, unlike {message!r:.80}")
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # the template's language has exceptions of its own
            raise ValueError(f"the chat template cannot render these messages: {error}") from error
        return encode(self.tokenizer, text, add_special_tokens=False)

    def _run(self, num_requests: int, use_tqdm: bool) -> dict[str, RequestOutput]:
        outputs: dict[str, RequestOutput] = {}
        num_tokens = 0
        with tqdm(total=num_requests, desc="requests", disable=not use_tqdm, dynamic_ncols=True) as bar:
            while self.engine.has_unfinished():
                for delta in self.engine.step():
                    known = outputs.setdefault(delta.request_id, delta)
                    if known is not delta:
                        known.extend(delta)
                    num_tokens += len(delta.outputs[0].token_ids)
                    bar.update(delta.finished)
                rate = num_tokens / max(bar.format_dict["elapsed"], 1e-9)
                bar.set_postfix_str(f"{rate:.0f} tok/s", refresh=False)
        return outputs


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, text or token ids, is a list of one."""
    if not isinstance(prompts, Sequence) or isinstance(prompts, BYTES):
        raise ValueError(f"prompts must be a string, token ids, or a list of these, not {prompts!r:.80}")
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
