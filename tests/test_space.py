"""The repository as a Hugging Face Space: its front matter, the model it finds there, its limits."""

from __future__ import annotations

import importlib
import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import app as entry
from engine import LLM, SamplingParams
from engine.model import loader
from tests.support import tiny_folder

ROOT = Path(__file__).parent.parent
COLOURS = {"red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray"}
HARDWARE = {"cpu-basic", "cpu-upgrade", "t4-small", "t4-medium", "l4x1", "a10g-small", "a10g-large"}


@pytest.fixture(scope="module")
def front() -> dict:
    """The block at the top of the README that tells a Space what to do."""
    found = re.match(r"---\n(.*?)\n---\n", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert found, "the README does not begin with a front matter"
    return yaml.safe_load(found[1])


def test_front_matter_is_one_that_a_space_accepts(front):
    assert front["sdk"] == "gradio"
    gradio = next(
        requirement
        for line in (ROOT / "requirements.txt").read_text().splitlines()
        if line.startswith("gradio")
        for requirement in [Requirement(line.partition("#")[0])]
    )
    assert front["sdk_version"] in gradio.specifier
    assert re.fullmatch(r"3\.\d+(\.\d+)?", front["python_version"])  # quoted, or 3.10 would be 3.1
    assert (ROOT / front["app_file"]).is_file()
    assert {front["colorFrom"], front["colorTo"]} <= COLOURS
    assert front["suggested_hardware"] in HARDWARE
    assert re.fullmatch(r"\d+[mh]", front["startup_duration_timeout"])
    assert 0 < len(front["short_description"]) <= 60
    assert front["title"] and front["license"] == "mit" and len(front["emoji"]) == 1


def test_the_model_is_preloaded_that_a_cpu_space_will_ask_for(front):
    (line,) = front["preload_from_hub"]
    name, files = line.split(" ")
    assert name == loader.HUB_MODEL["cpu"] and front["models"] == [name]
    assert front["suggested_hardware"].startswith("cpu")
    assert "model.safetensors" in files.split(",")


def test_what_is_preloaded_is_enough_to_answer_without_the_packaged_model(front, monkeypatch, tmp_path):
    """A cache as the preload leaves it, with a tiny model under the real one's name; no network."""
    name, files = front["preload_from_hub"][0].split(" ")
    repository = tmp_path / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    for file in files.split(","):
        shutil.copy(tiny_folder() / file, snapshot / file)
    settings = json.loads((snapshot / "tokenizer_config.json").read_text())
    # Where this model keeps its template on the Hub. `save_pretrained` writes it into a file of its own.
    settings["chat_template"] = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (snapshot / "tokenizer_config.json").write_text(json.dumps(settings))
    monkeypatch.setattr(loader, "GGUF_PACKAGE", "no_such_package")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    llm = LLM("auto", device="cpu", dtype="float32", num_blocks=16)
    assert llm.engine.info.model == name.partition("/")[2]
    (output,) = llm.chat(
        [{"role": "user", "content": "hello"}], SamplingParams(max_tokens=4, ignore_eos=True)
    )
    assert len(output.outputs[0].token_ids) == 4


def test_on_a_space_the_page_is_served_to_all_sides_and_within_limits(monkeypatch):
    assert not entry.ON_SPACE and entry.parse_args([]).host == "127.0.0.1"
    monkeypatch.setenv("SPACE_ID", "someone/glass-engine")
    try:
        there = importlib.reload(entry)
        assert there.ON_SPACE and there.parse_args([]).host == "0.0.0.0"
    finally:
        monkeypatch.undo()
        importlib.reload(entry)
