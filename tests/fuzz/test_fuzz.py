"""A damaged file ends every command that reads it in one sentence that names the file, and changes nothing."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.launch import environment
from tests.fuzz.mutate import STRUCTURED, mutate
from tests.fuzz.world import FULL, QUICK

ROOT = Path(__file__).parents[2]


def fuzz(*arguments: object) -> None:
    """In a separate process: cases are forked, which a process that has trained cannot do."""
    command = [sys.executable, "-m", "tests.fuzz", *map(str, arguments)]
    variables = environment(TRITON_INTERPRET=1, PYTHONPATH=ROOT)  # the working folder may not be on the path
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]


@pytest.mark.slow
def test_damaged_files_are_refused_in_one_sentence() -> None:
    fuzz("--quick", "--cases", 6)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(1, 5))
def test_2000_damaged_files_are_refused_in_one_sentence(seed: int) -> None:
    fuzz("--cases", 500, "--seed", seed)


def test_a_fuzz_case_is_reproducible(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    seen = set()
    for _ in range(2):
        path.write_text('{"step": 4, "loader": {"seed": 0}, "totals": [0.0, 1.5]}')
        seen.add((mutate(path, random.Random("0/7")), path.read_bytes()))
    assert len(seen) == 1


def test_every_format_has_structured_damage() -> None:
    suffixes = {Path(pattern).suffix for reader in (*QUICK, *FULL) for pattern in reader.files}
    assert suffixes - STRUCTURED.keys() <= {"", ".txt"}
