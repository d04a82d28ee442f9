import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from residua.cli.data import app
from residua.config.run import DataConfig, RunConfig
from residua.data import DataError, Dataset, Tokenizer
from residua.data.source import open_data, vocabulary

BYTES = ("--tokenizer", "bytes", "--holdout", "0", "--out")


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_info_describes_a_prepared_dataset(jsonl: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    printed = run("prepare", jsonl, "--out", out, "--tokenizer", "bpe:300", "--holdout", "0.1", "--workers", "1")
    assert f"residua train tiny --data {out}" in printed
    dataset = Dataset.open(out)
    printed = run("info", out, "--sample", "20")
    assert f"{dataset.split('train').tokens:,} tokens" in printed
    assert f"{dataset.bytes_per_token('validation'):.2f} bytes/token" in printed
    assert dataset.tokenizer.decode(dataset.split("validation").read(0, 20)) in printed


def test_info_checks_every_token(jsonl: Path, tmp_path: Path) -> None:
    run("prepare", jsonl, "--out", tmp_path / "out", "--tokenizer", "bytes", "--workers", "1")
    shard = Dataset.open(tmp_path / "out").split("train").shards[-1]
    with shard.path.open("r+b") as file:
        file.seek(128 + 2 * (shard.tokens - 1))
        file.write(b"\xff\xff")
    with pytest.raises(DataError, match=rf"holds id 65535 at token {shard.tokens - 1}, but the largest"):
        run("info", tmp_path / "out")


def test_info_escapes_terminal_control_codes_in_text(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a\x1b[2Jb\x1b]0;title\x07c")
    run("prepare", tmp_path / "text.txt", *BYTES, tmp_path / "out")
    shown = run("info", tmp_path / "out")
    assert "a\N{REPLACEMENT CHARACTER}[2Jb" in shown and not set(shown) & set("\x1b\x07")


@pytest.mark.slow
def test_printed_next_command_trains_with_a_larger_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("\n\n".join(f"{i * i:x} {i**3:x}" for i in range(20_000)))
    dataset = tmp_path / "data of mine"
    printed = run("prepare", tmp_path / "words.txt", "--out", dataset, "--tokenizer", "bpe:1500", "--workers", "1")
    *_, command = printed.partition("next: residua train ")
    preset, *rest = shlex.split(command)
    assert rest == ["--data", str(dataset), "--out", "runs/first"]
    config = RunConfig.find(preset).override([f"data.path='{dataset}'"])
    with pytest.raises(ValueError, match=r"set model\.vocab_size=1500 or more, or leave it out"):
        open_data(config)
    assert vocabulary(config.data) == 1536
    assert open_data(config.override(["model.vocab_size=1536"])).vocab_size == 1500


def test_vocabulary_of_embedded_corpus_is_known_unprepared(tmp_path: Path) -> None:
    Tokenizer.train(["some text " * 9], 265).save(tmp_path / "tokenizer.json")
    for tokenizer, size in (("bpe:1000", 1024), ("bytes", 384), (str(tmp_path / "tokenizer.json"), 384)):
        assert vocabulary(DataConfig(tokenizer=tokenizer)) == size


def test_vocabulary_too_large_for_the_text_is_reported(jsonl: Path, tmp_path: Path) -> None:
    printed = run("prepare", jsonl, "--out", tmp_path / "out", "--workers", "1")
    assert "token ids are too many for so little text: consider --tokenizer bpe:1024" in printed


def test_tiny_validation_text_is_reported(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a few words\n" * 1000)
    printed = run("prepare", tmp_path / "text.txt", "--out", tmp_path / "a", "--tokenizer", "bytes")
    assert "validation is tiny (1,2" in printed and "raise --holdout, or give --validation SOURCE" in printed
    assert "token ids are too many" not in printed
    assert "1 document " in printed and "1 shard\n" in printed
    (tmp_path / "text.txt").write_text("a few words\n" * 20_000)
    printed = run("prepare", tmp_path / "text.txt", "--out", tmp_path / "b", "--tokenizer", "bytes")
    assert "validation is tiny" not in printed


def test_text_without_validation_suggests_evaluation(jsonl: Path, tmp_path: Path) -> None:
    out = tmp_path / "data of mine"
    printed = run("prepare", jsonl, *BYTES, out)
    assert printed.endswith(f"next: residua eval RUN --data '{out}' --split train\n") and "residua train" not in printed


def test_skipped_files_are_reported_and_read_if_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("my code")
    (folder / ".git").mkdir(parents=True)
    for name in ("a.txt", "b.c", "c.c", "d.h", "e.tar.gz", "f.json", "g.x", "Makefile", ".git/config", ".hidden.c"):
        (folder / name).write_text(f"text of {name}")
    printed = run("prepare", folder, *BYTES, tmp_path / "a")
    left_out = "7 files skipped because of the suffix (.c, no suffix, .h, .tar.gz, …): to read text files among them, "
    assert f"{left_out}name them, as in residua data prepare 'my code'/*.c\n" in printed
    printed = run("prepare", folder, folder / "b.c", folder / "c.c", *BYTES, tmp_path / "b")
    assert "5 files skipped because of the suffix (no suffix, .h, .tar.gz, .json, …)" in printed
    assert Dataset.open(tmp_path / "b").split("train").documents == 3
    assert "skipped because" not in run("prepare", folder / "a.txt", *BYTES, tmp_path / "c")


def test_trained_tokenizer_is_used_to_prepare(jsonl: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    run("tokenizer", jsonl, "--vocab-size", "300", "--out", path)
    run("prepare", jsonl, "--tokenizer", path, "--out", tmp_path / "out")
    assert Dataset.open(tmp_path / "out").tokenizer_hash == Tokenizer.load(path).hash
    with pytest.raises(DataError, match="exists: name another --out, or move it elsewhere"):
        run("tokenizer", jsonl, "--vocab-size", "300", "--out", path)


def test_printed_command_after_tokenizer_training_can_be_run(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my $text.txt").write_text("some text " * 999)
    printed = run("tokenizer", "my $text.txt", "--vocab-size", "260", "--out", "my tokenizer.json")
    *_, command = printed.partition("next: residua data ")
    words = shlex.split(command)
    assert words == ["prepare", "my $text.txt", "--tokenizer", "my tokenizer.json", "--out", "DIR"]
    run(*words)
    assert Dataset.open("DIR").vocab_size == 260


def test_vocabulary_smaller_than_requested_is_reported(jsonl: Path, tmp_path: Path) -> None:
    printed = run("tokenizer", jsonl, "--vocab-size", "60000", "--out", tmp_path / "t.json")
    found = Tokenizer.load(tmp_path / "t.json").vocab_size
    assert f"the vocabulary has {found:,} entries, fewer than 60,000: the text has no more pairs" in printed
    printed = run("prepare", jsonl, "--tokenizer", "bpe:60000", "--out", tmp_path / "a")
    found = Dataset.open(tmp_path / "a").vocab_size
    assert f"the vocabulary has {found:,} entries, fewer than 60,000: the text has no more pairs" in printed
    assert "fewer than" not in run("prepare", jsonl, "--tokenizer", "bpe:300", "--out", tmp_path / "b")


def test_field_and_limit_reach_the_corpus(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"body": f"{i:04d}"}) + "\n" for i in range(100)))
    run("prepare", source, "--field", "body", "--max-bytes", "40", "--tokenizer", "bytes", "--out", tmp_path / "out")
    assert sum(split.documents for split in Dataset.open(tmp_path / "out").splits.values()) == 10


def test_document_that_crosses_the_limit_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefgh")
    run("prepare", tmp_path / "a.txt", "--max-bytes", "3", *BYTES, tmp_path / "out")
    assert Dataset.open(tmp_path / "out").split("train").bytes == 8
    assert "Stop after the document that reaches" in " ".join(run("prepare", "--help").split())


def test_mutually_exclusive_options_are_refused(jsonl: Path, tmp_path: Path) -> None:
    (tmp_path / "v.txt").write_text("held")
    for arguments, words in (
        (("--holdout", "0.1"), "need a SOURCE"),
        (
            (jsonl, "--validation", tmp_path / "v.txt", "--holdout", "0.1"),
            "--validation and --holdout both choose the validation text",
        ),
    ):
        with pytest.raises(DataError, match=words):
            run("prepare", *arguments, "--out", tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_validation_text_among_the_sources_is_not_trained_on(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("folder/below/held.txt", "folder/text.txt", "other.txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(f"the text of {name}")
    Path("link.txt").symlink_to("folder/below/held.txt")
    held = Path("folder/below/held.txt")
    for source, validation in ((held, tmp_path / held), ("folder", held), ("folder", "link.txt"), (held, "folder")):
        out = f"out-{source}-{validation}".replace("/", "-")
        printed = run("prepare", "other.txt", source, "--validation", validation, "--tokenizer", "bytes", "--out", out)
        assert "in the training text (1 verbatim, 0 up to case" in printed
        assert "; 1 training document was dropped from training (--overlap keep keeps them)\n" in printed
    printed = run("prepare", "other.txt", "--validation", "folder", "--tokenizer", "bytes", "--out", "out")
    assert "no validation document is in the training text\n" in printed


def test_skip_bad_counts_problems_and_shows_the_first_per_kind(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("messy").mkdir()
    lines = ('{"text": "one"}', '{"text": ', '{"text": 3}', '{"body": "x"}', '{"text"', '{"text": "two"}', "")
    Path("messy/a.jsonl").write_text("\n".join(lines))
    Path("messy/b.txt").write_bytes(b"\xff\xfe")
    Path("messy/c.txt.gz").write_bytes(b"not gzip")
    Path("messy/d.txt").write_text("three")
    with pytest.raises(DataError) as caught:
        run("prepare", "messy", *BYTES, "out")
    refusal = str(caught.value)
    assert refusal.startswith("6 problems in the text (2 lines not valid JSON, 1 line whose field 'text' is not text, ")
    places = ("line 2 is", "line 3: field", "line 4 has", "line 5 is", "b.txt is not UTF-8", "c.txt.gz (Not a gzip")
    assert [place for place in places if place not in refusal] == []
    assert "; messy/a.jsonl, line 5 is" in refusal  # after line 2, with the same advice
    assert "line 4 has no field 'text', which earlier lines have: correct or remove it. " in refusal
    assert refusal.endswith("or skip all of them with --skip-bad.") and not Path("out").exists()
    printed = run("prepare", "messy", "--skip-bad", *BYTES, "out")
    assert Dataset.open("out").split("train").documents == 3
    assert "2 lines skipped (not valid JSON), the first: messy/a.jsonl, line 2 is not valid JSON (" in printed
    assert "1 line skipped (without the field 'text'), the first: messy/a.jsonl, line 4 has no" in printed
    assert "1 file skipped (not UTF-8 text), the first: messy/b.txt is" in printed
    assert "1 file skipped (unreadable), the first: cannot read messy/c.txt.gz (" in printed


def test_partly_used_file_is_reported_with_skip_bad(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [b'{"text": "%d %s"}\n' % (n, b"word " * 1000) for n in range(40)]
    Path("half.jsonl").write_bytes(b"".join([*lines[:20], b'{"text": " "}\n\xff', *lines[20:]]))
    Path("none.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"^2 problems in the text \(2 files not UTF-8 text\)") as caught:
        run("prepare", "half.jsonl", "none.txt", *BYTES, "out")
    assert "skipped" not in str(caught.value)
    printed = run("prepare", "half.jsonl", "none.txt", "--skip-bad", *BYTES, "out")
    used = Dataset.open("out").split("train").documents
    assert 0 < used <= 20
    first = f"half.jsonl is not UTF-8 text (invalid start byte): read up to document {used}, then skipped"
    assert f"1 file partly skipped (not UTF-8 text), the first: {first}\n" in printed
    assert "1 file skipped (not UTF-8 text), the first: none.txt is not UTF-8 text (invalid start byte)\n" in printed
    part, whole = Dataset.open("out").description["skipped"]
    assert (part["partial"], part["first"], part["count"]) == (True, first, 1) and "partial" not in whole


def test_links_that_leave_a_folder_are_skipped_and_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("secret.txt").write_text("secret")
    Path("folder").mkdir()
    Path("folder/link.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(DataError, match=r"the folder folder holds no text: 1 link skipped .*\(folder/link\.txt to /"):
        run("prepare", "folder", *BYTES, "a")
    Path("folder/text.txt").write_text("text")
    Path("folder/inner.txt").symlink_to("text.txt")
    assert "1 link skipped because it leads out of the folder" in run("prepare", "folder", *BYTES, "b")
    assert Dataset.open("b").split("train").bytes == 8
    assert "skipped because" not in run("prepare", "folder", "secret.txt", *BYTES, "c")
    assert Dataset.open("c").split("train").bytes == 14


@pytest.mark.parametrize("verb", ["prepare", "tokenizer", "info"])
def test_help_shows_an_example(verb: str) -> None:
    assert f"residua data {verb} " in run(verb, "--help")


@pytest.mark.slow
def test_the_command_does_not_import_torch() -> None:
    program = (
        "import sys\nfrom typer.testing import CliRunner\nfrom residua.cli.data import app\n"
        "assert 'numpy' not in sys.modules\nimport residua.data\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
