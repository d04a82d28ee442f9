"""`residua doctor`: every operator is checked, and faults are rows with a fix, never a traceback."""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement as Independent

from residua import ops
from residua.cli import doctor as verb
from residua.doctor import environment, findings, kernels
from residua.doctor.environment import Requirement
from residua.doctor.findings import Finding
from residua.machine import python_command
from residua.ops._runtime.backend import Operator
from residua.ops._runtime.cases import Case, Sizes, example_cases
from tests.nightly import only_nightly
from tests.trained import residua

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
CPU = torch.device("cpu")


def examples(**sizes: int) -> dict[str, tuple[Operator, Case]]:
    cases = example_cases(CPU, torch.float32, Sizes(**sizes))
    return {name: (operator, case) for name, operator, case in cases}


CASES = examples()


@pytest.mark.slow
@pytest.mark.parametrize("helpers", [None, pytest.param(2, marks=pytest.mark.nightly)])
def test_references_agree_with_float64_on_a_cpu(helpers: int | None) -> None:
    found = list(kernels.self_test(CPU, helpers))
    assert [f.name for f in found] == [*CASES, "a small model"]
    assert [f for f in found if f.state != "ok"] == []
    plain = [f for f in found[:-1] if "rotary_table" not in f.name]  # a table is opaque, on any device
    assert all("PyTorch reference, relative error" in f.words for f in plain)


@pytest.mark.slow
@pytest.mark.parametrize("name", only_nightly(CASES, but=["inference.activate", "norm_rotate", "mix_heads"]))
def test_kernels_pass_on_the_self_test_inputs(name: str) -> None:
    """In Triton's interpreter; on a GPU the same calls run compiled."""
    if name == "grouped_linear":
        pytest.skip("PyTorch's grouped product needs bfloat16")
    operator, case = examples(tokens=12, width=64)[name]  # the interpreter is slow
    with ops.backend("triton"):
        finding = kernels.check(name, operator, case, 1e-4)
    assert finding.state == "ok" and "fused" in finding.words, finding


HELPER = """
import os, signal, sys, time
from residua.doctor.findings import Finding
from residua.doctor.kernels import serve

def check(name):
    os.write(1, b"noise of a library")
    if name == sys.argv[1]:
        open(sys.argv[2], "w").close()
        {then}
    return Finding("self-test", name, "ok", "a helper")

serve({{name: lambda name=name: check(name) for name in "abcd"}})
"""


def beside(then: str, last: str, folder: Path, count: int) -> Iterator[Finding]:
    """Checks a to d with helpers that begin at the end; a is made here, and waits until a helper comes to `last`."""
    os.mkfifo(folder / "waits")

    def made(name: str) -> Finding:
        if name == "a":
            (folder / "waits").read_bytes()
        return Finding("self-test", name, "ok", "this process")

    command = python_command("-c", HELPER.format(then=then), last, str(folder / "waits"))
    return kernels.run_beside({name: partial(made, name) for name in "abcd"}, command, count, first="dcb")


def test_slow_checks_start_first_and_findings_keep_their_order(tmp_path: Path) -> None:
    found = [(finding.name, finding.words) for finding in beside("pass", "b", tmp_path, 2)]
    assert found == [("a", "this process"), ("b", "a helper"), ("c", "a helper"), ("d", "a helper")]


def test_dead_helper_fails_its_check_and_the_parent_continues(tmp_path: Path) -> None:
    a, b, c, d = beside("os.kill(os.getpid(), signal.SIGKILL)", "c", tmp_path, 1)
    assert (a.words, b.words, d.words) == ("this process", "this process", "a helper")
    assert c.state == "failed" and c.words == "the process of this check was killed by SIGKILL"


def test_helpers_are_ended_when_the_self_test_is_closed(tmp_path: Path) -> None:
    found = beside("time.sleep(1e6)", "d", tmp_path, 1)
    next(found)
    found.close()  # would wait for its helper


def test_parent_runs_all_checks_if_helpers_do_not_start() -> None:
    made = {name: partial(Finding, "self-test", name, "ok", "") for name in "ab"}
    seen: list[tuple[int, int]] = []
    found = kernels.run_beside(
        made, python_command("-c", "raise SystemExit(3)"), 2, progress=lambda *at: seen.append(at)
    )
    assert [finding.name for finding in found] == ["a", "b"] and seen == [(1, 2), (2, 2)]


def test_helper_count_depends_on_cores_and_gpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, gpu = 16 * 2**30, torch.device("cuda")
    monkeypatch.setattr(kernels, "free_memory", lambda device: memory)
    counts = []
    for cores in (1, 2, 3, 16):
        monkeypatch.setattr(kernels, "available_cores", lambda cores=cores: cores)
        counts.append(kernels.helper_count(gpu))
    memory = 3 * 2**30 + 5
    assert counts == [0, 0, 2, 7] and kernels.helper_count(gpu) == 3 and kernels.helper_count(CPU) == 0


def test_checks_listed_as_slowest_exist() -> None:
    assert set(kernels.longest_to_compile()) <= {*CASES, "a small model"}


@pytest.mark.parametrize("fault", ["wrong", "not finite", "raises"])
def test_a_wrong_kernel_fails_its_check(fault: str) -> None:
    def broken(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if fault == "raises":
            raise RuntimeError("Failed to find C compiler.\nPlease specify one")
        return ops.rms_norm.reference(x, weight) * (1.01 if fault == "wrong" else torch.nan)

    operator: Operator = Operator(ops.rms_norm.reference, fused=broken, serves=lambda *_: True)
    found = kernels.check("rms_norm", operator, CASES["rms_norm"][1], 1e-4)
    assert found.state == "failed"
    assert found.fix == "apt-get install gcc" if fault == "raises" else "backend('reference')" in found.fix
    assert "\n" not in found.words


def test_requirements_are_read_as_by_packaging() -> None:
    lines = [*PROJECT["dependencies"]]
    for extra, needs in PROJECT["optional-dependencies"].items():
        lines += [f"{need}{' and' if ';' in need else ';'} extra == '{extra}'" for need in needs]
    for line in lines:
        ours, exact = Requirement.parse(line), Independent(line)
        assert ours.name == exact.name
        assert str(exact.specifier) == (f"{ours.relation}{ours.least}" if ours.least else ""), line
        assert (ours.extra in str(exact.marker)) and (ours.system in str(exact.marker))
        if exact.marker is not None:
            given = {"platform_system": ours.system, "extra": ours.extra}
            assert exact.marker.evaluate(given) and not exact.marker.evaluate(given | {"extra": "another"})


def test_every_extra_has_a_purpose() -> None:
    assert set(environment.PURPOSES) == set(PROJECT["optional-dependencies"]) - {*environment.DEVELOPERS}


def test_faulty_packages_get_a_row_with_a_fix_command(tmp_path: Path, monkeypatch) -> None:
    for name, version in (("planted-good", "1.2"), ("planted-broken", "3.0"), ("planted-old", "0.9.1")):
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (tmp_path / "planted_good.py").write_text("print('noise')")
    (tmp_path / "planted_broken.py").write_text("raise OSError('libplanted.so:\\n  not found')")
    monkeypatch.syspath_prepend(tmp_path)
    needs = [
        Requirement("planted-good", "1.2", "hf"),
        Requirement("planted-broken", "", "eval"),
        Requirement("planted-old", "0.10"),
        Requirement("planted-absent", "2.0"),
        Requirement("planted-extra", "2.0", "quant"),
        Requirement("planted-elsewhere", "", "triton", "Plan9"),
        Requirement("planted-good", "1.1", "titan", relation="=="),
    ]
    good, broken, old, absent, extra, pinned = environment.packages(needs)
    assert good.state == "ok" and "1.2, for models of transformers" in good.words
    assert broken.state == "failed" and "OSError: libplanted.so: not found" in broken.words
    assert old == Finding("packages", "planted-old", "failed", "0.9.1 is too old", "pip install -U 'planted-old>=0.10'")
    assert absent.state == "failed" and absent.fix == "pip install 'planted-absent>=2.0'"
    assert extra.state == "missing" and extra.fix == "pip install 'residua[quant]'"
    assert pinned.state == "note" and pinned.fix == "pip install 'planted-good==1.1'"


def test_a_failing_check_gets_a_row_and_exit_status_1(monkeypatch, capsys) -> None:
    def failing():
        yield Finding("packages", "good", "ok", "1.0")
        raise ImportError("cannot import \x1b[31m torch")

    monkeypatch.setattr(verb, "checks", lambda quick, bars: [("packages", failing)])
    assert residua(monkeypatch, "doctor") == 1
    shown = capsys.readouterr()
    assert "1 of 2 checks failed: packages." in shown.out
    assert "\x1b" not in shown.out and "Traceback" not in shown.err
    assert residua(monkeypatch, "doctor", "--json") == 1
    assert json.loads(capsys.readouterr().out)["passed"] is False


@pytest.mark.slow
def test_the_quick_check_imports_no_torch_and_prints_json() -> None:
    code = "import sys; sys.argv = ['residua', 'doctor', '--quick', '--json']\nfrom residua.cli.main import main\n"
    code += "try: main()\nexcept SystemExit as end: sys.exit(3 if 'torch' in sys.modules else end.code)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    assert content["passed"] and {"residua", "python", "torch"} <= {row["name"] for row in content["findings"]}


def test_notes_and_missing_extras_do_not_fail() -> None:
    rows = [Finding("extras", "a", "missing", "w"), Finding("device", "b", "note", "w")]
    assert findings.passed(rows) and findings.closing(rows) == "All 2 checks passed."
