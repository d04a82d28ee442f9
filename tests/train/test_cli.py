"""`residua train` from the command line: exit codes and sentences, no traceback."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from residua.cli.main import main
from residua.config.run import RunConfig
from residua.config.topologies import MultiGate
from residua.data.source import find_data
from tests.train.conftest import stop_after

Call = Callable[..., tuple[int, str]]


@pytest.fixture
def file(config: RunConfig, tmp_path: Path) -> str:
    (tmp_path / "mine.toml").write_text(config.to_toml())
    return str(tmp_path / "mine.toml")


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run `residua train` with arguments; its exit code and everything it printed."""

    def run(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["residua", "train", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        output = "".join(capsys.readouterr())
        return int(end.value.code or 0), output

    return run


@pytest.mark.slow
def test_a_config_file_is_trained_with_overrides_and_variants(
    call: Call, file: str, data: Path, tmp_path: Path
) -> None:
    code, output = call(
        file,
        "train.steps=4",
        "mgr2+gatednorm",
        "--data",
        data,
        "--out",
        tmp_path / "run",
        "model.layers=1",
        "--threads",
        1,
    )
    assert code == 0 and "Finished" in output
    config = RunConfig.from_toml(tmp_path / "run" / "config.toml")
    assert (config.train.steps, config.model.layers, config.data.path) == (4, 1, str(data))
    assert config.model.topology == MultiGate(streams=2) and config.model.norm.kind == "gatednorm"


def test_folder_named_like_terminal_codes_is_printed_as_text(call: Call, file: str, data, tmp_path) -> None:
    odd = tmp_path / "[/red]\x1b[31m"
    shutil.copytree(data, odd)
    code, output = call(file, "train.steps=3", "--data", odd, "--out", tmp_path / "[bold]run")
    assert code == 0 and "[/red]\N{REPLACEMENT CHARACTER}[31m" in output and "[bold]run" in output
    code, output = call(f"{odd}/no.toml", "--out", tmp_path / "x")
    assert code == 2 and "\x1b" not in output


def test_a_config_file_without_a_stem_requires_out(call: Call, file: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(file).rename(tmp_path / "...toml")
    code, output = call("...toml")
    assert code == 2 and "choose one with --out" in output


@pytest.mark.slow
def test_ctrl_c_prints_a_resume_command_that_works(call: Call, file, tmp_path, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, 3, signal.SIGINT)
        code, output = call(file, "--out", tmp_path / "run")
    assert code == 130 and f"continue with `residua train --resume --out {tmp_path / 'run'}`." in output
    code, output = call("--resume", "--out", tmp_path / "run")
    assert code == 0 and "resuming after step 3 of 6" in output
    code, output = call("--resume", "--out", tmp_path / "run", "train.steps=7")
    assert code == 0 and "step 7/7" in output


@pytest.mark.slow
def test_moved_data_is_refused_until_its_new_path_is_given(call: Call, file: str, data: Path, tmp_path: Path) -> None:
    old, new, out = tmp_path / "old", tmp_path / "new", tmp_path / "run"
    shutil.copytree(data, old)
    assert call(file, "--data", old, "--out", out)[0] == 0
    old.rename(new)
    code, output = call("--resume", "--out", out, "train.steps=7")
    assert code == 2 and f"{old} does not exist" in output and "if it was moved, give --data DIR" in output
    code, output = call("--resume", "--out", out, "train.steps=7", "--data", new)
    assert code == 0 and "step 7/7" in output


@pytest.mark.slow
def test_relative_data_path_is_stored_as_absolute(call: Call, data, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(data.parent)
    (tmp_path / "mine.toml").write_text(f'extends = "tiny"\n[data]\npath = "{data.name}"\n')
    assert call(tmp_path / "mine.toml", "--out", tmp_path / "run", *SMALL)[0] == 0
    assert call("--from", tmp_path / "run", f"data.path={data.name}", "--out", tmp_path / "new")[0] == 0
    monkeypatch.chdir(tmp_path)
    for run in ("run", "new"):
        assert RunConfig.from_toml(tmp_path / run / "config.toml").data.path == str(data)
        assert call("--resume", "--out", run, "train.steps=3")[0] == 0


def test_relative_path_of_an_old_run_is_read_from_the_cwd(call, data, tmp_path, monkeypatch) -> None:
    assert call("tiny", "--data", data, "--out", tmp_path / "run", *SMALL)[0] == 0
    written = tmp_path / "run" / "config.toml"
    written.write_text(written.read_text().replace(str(data), data.name))
    monkeypatch.chdir(tmp_path)
    code, output = call("--resume", "--out", "run", "train.steps=3")
    assert code == 2 and f"{tmp_path / data.name} does not exist: if it was moved, give --data DIR" in output
    with pytest.raises(
        ValueError, match=rf"{data.name} does not exist in {tmp_path}: if it was moved, give --data DIR"
    ):
        find_data(RunConfig.from_toml(written))
    monkeypatch.chdir(data.parent)
    assert call("--resume", "--out", tmp_path / "run", "train.steps=3")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "nothing to train was named"),
        (["--out", "x"], "nothing to train was named"),
        (["--resume", "--out", "x"], "x has no run to resume"),
        (["tinny"], "preset 'tinny' does not exist: did you mean 'tiny'?"),
        (["nowhere.toml"], "nowhere.toml does not exist"),
        (["tiny", "--data", "nowhere"], "nowhere does not exist: if it was moved"),
        (["tiny", "train.lr=3"], "train.lr = 3 is not a known key"),
        (["tiny", "mud"], "'mud' is not a known variant: did you mean 'mudd'?"),
        (["tiny", "mgr2+mudd"], "'mgr2' and 'mudd' both set model.topology.kind"),
    ],
)
def test_a_mistake_is_reported_in_one_sentence(
    call: Call, arguments: list[str], sentence: str, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, output = call(*arguments)
    assert code == 2 and sentence in output and "Traceback" not in output
    assert not list(tmp_path.iterdir())


SMALL = [
    "model.layers=1", "model.width=16", "model.attention.heads=2", "model.ffn.hidden=16", "model.context=16",
    "train.steps=2", "train.schedule.warmup=0", "train.micro_batch=2", "data.validation_tokens=64", "train.device=cpu",
]  # fmt: skip


def vocabulary(run: Path) -> int:
    return RunConfig.from_toml(run / "config.toml").model.vocab_size


def test_vocabulary_follows_the_text_unless_set(call: Call, data: Path, tmp_path: Path) -> None:
    code, output = call("tiny", "--data", data, "--out", tmp_path / "a", *SMALL)
    assert code == 0 and vocabulary(tmp_path / "a") == 384
    assert f"residua compare prenorm mgr --base {tmp_path / 'a'}/config.toml\n" in output
    assert "384 token ids: 257 in the text, padded to a multiple of 128\n" in output
    assert "validation is tiny (" in output and "1 layer of width 16" in output and "CPU with 1 thread," in output
    code, output = call(
        "tiny", "--data", data, "--out", tmp_path / "b", *SMALL, "model.vocab_size=640", "model.topology=full_attnres",
        "model.anchors=cla",
    )  # fmt: skip
    assert code == 0 and vocabulary(tmp_path / "b") == 640
    assert f"residua compare prenorm base --base {tmp_path / 'b'}/config.toml\n" in output
    assert "of width 16, full_attnres, cla anchors, " in output
    assert "640 token ids, 257 of them in the text: model.vocab_size=384 is enough\n" in output


def test_vocabulary_set_in_a_file_is_kept_but_not_its_presets(call: Call, data, tmp_path) -> None:
    for written, size in (("", 384), ("[model]\nvocab_size = 300\n", 300)):
        (tmp_path / "mine.toml").write_text(f'extends = "tiny"\n{written}')
        out = tmp_path / f"run{size}"
        assert call(tmp_path / "mine.toml", "--data", data, "--out", out, *SMALL)[0] == 0
        assert vocabulary(out) == size


def test_resume_with_the_preset_name_keeps_the_vocabulary(call: Call, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert call("tiny", "--data", data, "--out", out, *SMALL, "model.vocab_size=640")[0] == 0
    code, output = call("tiny", "--resume", "--data", data, "--out", out, *SMALL, "train.steps=3")
    assert code == 0 and "step 3/3" in output and vocabulary(out) == 640
    code, output = call("--from", out, "--data", data, "--out", tmp_path / "new", "train.steps=2")
    assert code == 0 and vocabulary(tmp_path / "new") == 640
