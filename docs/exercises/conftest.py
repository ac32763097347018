"""Lets the tests run on the exercises, which you solve, or with --solutions on the solutions."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)  # tiny matrices on several threads mostly wait for each other


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--solutions", action="store_true", help="test the solutions instead of the exercises")


@pytest.fixture
def exercise(request: pytest.FixtureRequest):
    """The module under test: for `test_ex3_memory.py`, it is `ex3_memory.py`."""
    path = Path(request.path)
    folder = path.parent / "solutions" if request.config.getoption("--solutions") else path.parent
    name = path.name.removeprefix("test_")
    spec = importlib.util.spec_from_file_location(Path(name).stem, folder / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
