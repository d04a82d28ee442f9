"""The notebook runs from its first cell to its last."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "notebooks" / "quickstart.ipynb"


def test_the_notebook_is_kept_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


@pytest.mark.nightly
def test_the_notebook_runs_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat", reason="needs the docs extra: `make docs` installs it")
    jupyter = pytest.importorskip("jupyter_client", reason="needs the docs extra: `make docs` installs it")
    nbclient = pytest.importorskip("nbclient", reason="needs the docs extra: `make docs` installs it")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with tempfile.TemporaryDirectory(prefix="kernel-") as sockets:  # files, not ports; their paths must be short
        monkeypatch.setenv("JUPYTER_RUNTIME_DIR", sockets)
        kernel = jupyter.AsyncKernelManager(kernel_name="python3", transport="ipc")
        where = {"metadata": {"path": str(tmp_path)}}
        nbclient.NotebookClient(notebook, km=kernel, timeout=None, resources=where).execute()
    shown = json.dumps(notebook.cells[-2]["outputs"])
    assert "block_attnres" in shown and "mgr" in shown
    assert (tmp_path / "runs" / "verdict" / "report.html").exists()
    assert (tmp_path / "runs" / "first" / "report.html").exists()
