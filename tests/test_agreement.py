"""The share of equal next tokens: whole for the same weights, smaller for others."""

from __future__ import annotations

import benchmark
from bench.agreement import top1_agreement
from engine.model import load_model
from tests.support import tiny_folder, tiny_llm

PROMPTS = ["one", "two and more", "3"]


def test_a_model_agrees_with_itself():
    agreement = top1_agreement(tiny_llm(), tiny_llm(mode="naive"), PROMPTS, num_tokens=20)
    assert agreement == (60, 60) and agreement.share == 1.0


def test_other_weights_agree_less():
    other = load_model(str(tiny_folder()), dtype="float32")
    other.model.embedding.data.mul_(-1)
    assert top1_agreement(tiny_llm(), tiny_llm(other), PROMPTS, num_tokens=20).share < 0.9


def test_the_whole_command(capsys):
    assert benchmark.main(["--model", str(tiny_folder()), "--dtype", "bfloat16", "--agreement"]) == 0
    assert "Weights in bfloat16: the next token is float32's at" in capsys.readouterr().out
