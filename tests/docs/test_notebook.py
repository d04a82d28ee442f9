"""The notebook runs from its first cell to its last."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "notebooks" / "quickstart.ipynb"


def test_the_notebook_is_committed_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


RUN = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell

shell, result = InteractiveShell.instance(), None
for cell in json.load(open(sys.argv[1], encoding="utf-8"))["cells"]:
    if cell["cell_type"] == "code":
        result = shell.run_cell("".join(cell["source"]))
        if not result.success:
            sys.exit(1)
print(result.result.data)
"""


@pytest.mark.nightly
def test_the_notebook_runs_on_a_cpu(tmp_path: Path) -> None:
    pytest.importorskip("IPython", reason="needs the docs extra: `make docs` installs it")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", RUN, str(NOTEBOOK)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    table = done.stdout.rpartition("| variant")[2]
    assert "block_attnres" in table and "mgr" in table
    assert (tmp_path / "runs" / "verdict" / "report.html").exists()
    assert (tmp_path / "runs" / "first" / "report.html").exists()
