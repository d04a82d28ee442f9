"""A mistyped argument gives one sentence that names it; nothing is written, and no traceback is shown."""

import os
from pathlib import Path

import pytest

from residua.cli import main as command
from residua.config.model import ModelConfig
from residua.config.settings import ConfigError
from residua.machine import short_bytes
from tests.cli.conftest import Say
from tests.trained import residua

HUGE = "99999999999999999999999"
ADDRESS = "residua: s3://b/x is a URL, but Residua reads and writes only local files"


@pytest.fixture
def here(monkeypatch, tmp_path: Path) -> None:
    """The working folder has a `file` and a `folder`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("presets tinny", "residua: preset 'tinny' does not exist: did you mean 'tiny'?\n"),
        ("presets --matching zzz", "residua: no preset name contains 'zzz': `residua presets` lists them all.\n"),
        ("train tiny --out nowhere model.attention.gate=elementwse",
         "residua: model.attention.gate = 'elementwse' is not a choice: did you mean 'elementwise'?\n"),
        ("train tiny --out nowhere model.topology=ful_attnres",
         "residua: model.topology.kind = 'ful_attnres' does not exist, and no module named in RESIDUA_PLUGINS "
         "adds it: did you mean 'full_attnres'?\n"),
        ("train tiny model.norm.kind=x", "residua: model.norm.kind = 'x' does not exist"),
        ("train tiny model.width=-1", "residua: model.width = -1 is invalid"),
        ("train tiny model.layers=true", "residua: model.layers = True is invalid: expected a whole number"),
        ("train tiny train.steps=true", "residua: train.steps = True is invalid: expected a whole number"),
        ("train tiny model.attention.heads=3",
         "residua: model.attention.heads = 3 does not divide model.width = 128: choose one of 1, 2, 4, 8, 16, 32, "
         "64, 128 or set model.attention.head_dim."),
        ("train tiny model.layers=99999999", "residua: model.layers = 99999999 is invalid: expected"),
        ("train tiny model.topology.streams=8", "residua: model.topology.streams = 8 is not a known key"),
        ("train tiny model.topology={kind='injection',prelude=1,loop=1,turns=2}",
         "residua: model.topology.kind = 'injection' has prelude = 1, loop = 1 and turns = 2, which is not "
         "model.order.kind = 'sequential': set model.order={kind='loop', prelude=1, coda=2, turns=2}."),
        ("export run", "residua: missing option '--out': `residua export --help` shows all options, with examples."),
        ("reproduce zzz", "residua: there is no entry 'zzz': `residua reproduce` lists them."),
        ("trian tiny", "residua: there is no command 'trian': did you mean 'train'?"),
        ("zzz", "residua: there is no command 'zzz': choose one of 'train',"),
        (f"train tiny train.seed={HUGE}",
         f"residua: train.seed = {HUGE} is invalid: expected less than 9223372036854775808."),
        (f"train tiny data.seed={HUGE}", f"residua: data.seed = {HUGE} is invalid: expected"),
        (f"train tiny model.width={HUGE}", f"residua: model.width = {HUGE} is invalid: expected"),
        (f"train tiny train.micro_batch={HUGE}", f"residua: train.micro_batch = {HUGE} is invalid"),
        ("train tiny =3", "residua: override '=3' is not of the form section.key=value."),
        ("train tiny model=3", "residua: model = 3 should be a table of keys."),
        ("train tiny steps=3", "residua: override 'steps=3' has no known section: write train.steps=3."),
        ("train folder", "residua: 'folder' is neither a preset (`residua presets` lists them) nor a .toml file."),
        ("train tiny --out file", "residua: file is a file: choose another --out."),
        ("train tiny --out file/x", "residua: file is a file, so file/x cannot be created: choose another --out."),
        ("train tiny --out _EMPTY_", "residua: --out is empty: give it a value or leave it out."),
        ("train tiny --out=", "residua: --out is empty"),
        ("train _EMPTY_", "residua: an argument is empty"),
        *((f"{line}s3://b/x", ADDRESS) for line in (
            "train tiny --out ", "train --resume --out=", "train tiny data.path=", "compare prenorm mgr --out ",
            "reproduce 004:table1 --out ", "export folder --out ", "diagnose ", "data prepare folder --out ",
            "import folder --out ", "eval folder --out ", "bench step tiny --out ",
        )),
        ("train --from s3://b/x --out new", ADDRESS),
        ("quantize s3://b/x --out q", ADDRESS),
        (f"train tiny --threads {HUGE}", "residua: invalid value for '--threads'"),
        ("train tiny --nonsense", "residua: no such option: --nonsense: `residua train --help` shows all options"),
        ("quantize nowhere --out q", "residua: nowhere is not a folder: name a run of `residua train`"),
        ("quantize folder --out q", "residua: folder holds no model: name a run of `residua train`"),
        ("data info folder --sample -1", "residua: invalid value for '--sample'"),
        ("data prepare folder --out p --workers 0", "residua: invalid value for '--workers'"),
        ("data prepare folder --out p --shard-tokens 0", "residua: invalid value for '--shard-tokens'"),
        ("data prepare folder --out p --max-bytes -4", "residua: invalid value for '--max-bytes'"),
        ("data prepare folder --out p --holdout 2", "residua: --holdout 2 is not a fraction of the text"),
        ("data prepare folder --out p --holdout nan", "residua: --holdout nan is not a fraction of the text"),
        ("data prepare folder --out p --tokenizer _EMPTY_", "residua: --tokenizer is empty"),
        (f"data tokenizer --vocab-size {HUGE} --out t.json", "residua: invalid value for '--vocab-size'"),
        ("compare prenorm mgr --out file/x",
         "residua: file is a file, so file/x cannot be created: choose another --out."),
        ("compare prenorm mgr --sizes tiny", "residua: --sizes tiny is too few for a fit: name at least two sizes"),
        ("compare prenorm mgr --sizes tiny,mini --tokens-per-parameter 0",
         "residua: --tokens-per-parameter 0 must be above 0"),
        ("compare prenorm mgr --quantize _EMPTY_", "residua: --quantize is empty"),
        ("compare prenorm mgr --set model.norm=x", "model.norm.kind = 'x' does not exist"),
        ("bench step tiny --micro-batch 0", "residua: invalid value for '--micro-batch'"),
        ("bench step tiny --out folder", "residua: --out folder is a folder: name the file to write."),
        ("bench step tiny --out file/x", "residua: file is a file: choose another --out."),
        ("bench fp8 --sizes 0:0", "residua: --sizes 0:0 is not a list of shapes: write IN:OUT pairs"),
        ("bench fp8 --sizes -1:3", "residua: --sizes -1:3 is not a list of shapes"),
        (f"bench plan tiny --gpus {HUGE}", "residua: invalid value for '--gpus'"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("here")
def test_messages_quote_the_argument_as_typed(line: str, sentence: str, say: Say) -> None:
    said = say(*(word.replace("_EMPTY_", "") for word in line.split()))
    assert sentence in said
    assert said.startswith("residua: ") == sentence.startswith("residua: ") or "set:" in said


def test_model_override_error_names_the_key_as_typed() -> None:
    with pytest.raises(ConfigError, match=r"^norm\.kind = 'x' does not exist"):
        ModelConfig.preset("tiny").override(["norm=x"])


def test_only_one_rank_prints_the_usage_error(say: Say, monkeypatch) -> None:
    """The others wait, and torchrun ends them."""
    waited: list[float] = []
    monkeypatch.setattr(command.time, "sleep", waited.append)
    assert "no such option" in say("train", "tiny", "--nonsense") and waited == []
    monkeypatch.setitem(os.environ, "RANK", "1")
    assert say("train", "tiny", "--nonsense") and waited == [command.GRACE_SECONDS]


@pytest.mark.parametrize(("arguments", "code"), [(["presets", "tiny"], 0), (["--help"], 0), ([], 2)])
def test_exit_codes_distinguish_usage_errors_from_success(monkeypatch, capsys, arguments: list[str], code: int) -> None:
    assert residua(monkeypatch, *arguments) == code and capsys.readouterr()


def test_small_sizes_are_not_shown_as_zero_gib() -> None:
    assert [short_bytes(n) for n in (300_000, 3_400_000, 5 * 2**30)] == ["0.3 MiB", "3.2 MiB", "5.0 GiB"]


def test_a_newline_in_a_path_does_not_break_the_message(sentence: Say) -> None:
    assert sentence("quantize", "no\nwhere", "--out", "q").startswith("no where is not a folder")


def test_prompt_file_that_is_a_pipe_is_refused(sentence: Say, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    said = sentence("generate", "run", "--file", tmp_path / "pipe")
    assert "pipe is not a regular file: --file is a text file" in said
