"""`residua data`: prepare text for training."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from residua.cli.options import argument, option, require_choice

if TYPE_CHECKING:
    from residua.data import Corpus, Dataset

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Prepare text for training: tokenizers, and datasets of memory-mapped tokens.\n\n"
    "Example: residua data prepare corpus.jsonl.xz --out data/",
)

Sources = Annotated[
    list[str] | None,
    argument(
        "Files, folders, or a Hugging Face dataset (org/name or org/name:config). "
        "Without one: the standard library of this Python.",
        metavar="SOURCE",
    ),
]
Field = Annotated[str, option("Name of the field with the text in JSONL, Parquet and datasets.")]
SkipBad = Annotated[bool, option("Skip lines and files that cannot be read, and report how many.", "--skip-bad")]
Limit = Annotated[
    int | None, option("Stop after the document that reaches this many bytes of text.", "--max-bytes", min=1)
]


def _corpus(
    sources: list[str] | None,
    field: str,
    validation: str | None,
    holdout: float | None,
    limit: int | None,
    skip_bad: bool,
) -> Corpus:
    """The corpus that the options describe; prints which files in folders are skipped."""
    from residua.data import DataError, open_corpus, standard_library
    from residua.data.readers import left_out_notice, links_notice
    from residua.report.plain import printable

    if holdout is not None and not 0 <= holdout < 1:
        raise DataError(f"--holdout {holdout:g} is not a fraction of the text: use 0 or more, and less than 1.")
    if validation is not None and holdout:
        raise DataError("--validation and --holdout both choose the validation text: give one of the two")
    if sources:
        corpus = open_corpus(
            sources, field=field, validation=validation, holdout=holdout, limit=limit, skip_bad=skip_bad
        )
        for notice in (left_out_notice(corpus.left_out), links_notice(corpus.links)):
            if notice is not None:
                typer.echo(printable(notice))
        return corpus
    if validation is not None or holdout is not None or limit is not None or skip_bad:
        options = "--validation, --holdout, --max-bytes and --skip-bad"
        raise DataError(f"{options} need a SOURCE, because the built-in corpus has a fixed split")
    return standard_library()


@app.command()
def prepare(
    out: Annotated[Path, option("The folder to write: a new or empty one, or one with this same dataset.")],
    sources: Sources = None,
    tokenizer: Annotated[
        str | None,
        option(
            "bytes, bpe:N (trained on the text itself), a tokenizer.json, or a folder with one "
            "or with GPT-2's vocab.json and merges.txt.",
            default="bpe:8192, or bpe:1024 without SOURCE",
        ),
    ] = None,
    validation: Annotated[
        str | None, option("Text for the validation split.", default="held out of SOURCE", metavar="SOURCE")
    ] = None,
    holdout: Annotated[
        float | None,
        option(
            "Fraction of the text held out for validation; 0 for none.",
            default="0.01, but at least 32 KiB and at most a tenth",
        ),
    ] = None,
    overlap: Annotated[
        str | None,
        option(
            "Training documents that also occur in the validation text, ignoring case, punctuation and white "
            "space: drop or keep them, or refuse to continue.",
            default="drop",
            metavar="[drop|keep|refuse]",
        ),
    ] = None,
    field: Field = "text",
    limit: Limit = None,
    skip_bad: SkipBad = False,
    workers: Annotated[int | None, option("Tokenizer threads.", default="all cores", min=1)] = None,
    shard_tokens: Annotated[int, option("Tokens per shard file.", min=1)] = 100_000_000,
) -> None:
    """Tokenize text into a folder for `residua train --data`.

    \b
    residua data prepare book.txt --out data/book
    residua data prepare corpus/ --out data/corpus --tokenizer gpt2/ --holdout 0.005
    residua data prepare train.jsonl.xz --validation val.jsonl.xz --out data/wiki
    residua data prepare org/name:config --max-bytes 2000000000 --out data/web
    """
    from residua import data
    from residua.data.overlap import DROP, KEEP, RULES
    from residua.data.pipeline import BPE, size_of

    rule = overlap or (DROP if sources else KEEP)  # the built-in corpus is the same on every machine
    require_choice("--overlap", rule, RULES)
    corpus = _corpus(sources, field, validation, holdout, limit, skip_bad)
    chosen = tokenizer or ("bpe:8192" if sources else "bpe:1024")
    data.prepare(corpus, out, chosen, workers=workers, shard_tokens=shard_tokens, overlap=rule, progress=True)
    opened = data.Dataset.open(out)
    _describe(opened, sample=0)
    _tell_findings(opened)
    if chosen.startswith(BPE):
        _tell_fewer(opened.vocab_size, size_of(chosen))
    if tokenizer is None and opened.split("train").tokens < 20 * opened.vocab_size:
        typer.echo(f"{opened.vocab_size:,} token ids are too many for so little text: consider --tokenizer bpe:1024")
    if (notice := opened.tiny_validation()) is not None:
        typer.echo(f"{notice}: raise --holdout, or give --validation SOURCE")
    folder = shlex.quote(str(out))
    if "validation" in opened.splits:
        typer.echo(f"\nnext: residua train tiny --data {folder} --out runs/first")
    else:
        typer.echo("there is no validation split, and training needs one: give --holdout or --validation SOURCE")
        typer.echo(f"\nnext: residua eval RUN --data {folder} --split train")


@app.command()
def tokenizer(
    out: Annotated[Path, option("The tokenizer.json to write; an existing file is refused.")],
    vocab_size: Annotated[
        int, option("Entries, including the 256 bytes and the end-of-text token.", min=257, max=2**24)
    ],
    sources: Sources = None,
    field: Field = "text",
    limit: Limit = None,
    skip_bad: SkipBad = False,
) -> None:
    """Train a byte-level BPE tokenizer on text.

    \b
    residua data tokenizer corpus/ --vocab-size 16384 --out tokenizer.json
    """
    from residua.data import DataError, train_tokenizer
    from residua.data.pipeline import progress_bar
    from residua.reading import counted

    if out.exists():
        raise DataError(f"{out} exists: name another --out, or move it elsewhere.")
    if not out.parent.is_dir():
        raise DataError(f"the folder {out.parent} for --out does not exist: create it first")
    corpus = _corpus(sources, field, None, 0.0 if sources else None, limit, skip_bad)
    with progress_bar(True) as bar:
        trained = train_tokenizer(corpus, vocab_size, bar)
    trained.save(out)
    typer.echo(f"{out}: {counted(trained.vocab_size, 'entry', 'entries')}, sha256 {trained.hash}")
    _tell_fewer(trained.vocab_size, vocab_size)
    words = ["residua", "data", "prepare", *(corpus.names if sources else ()), "--tokenizer", str(out), "--out", "DIR"]
    typer.echo(f"\nnext: {shlex.join(words)}")


@app.command()
def info(
    dataset: Annotated[Path, argument("A folder made by `residua data prepare`.", metavar="DIR")],
    sample: Annotated[int, option("Tokens of each split to show as text.", min=0)] = 120,
) -> None:
    """Check every token of a dataset and show its contents.

    \b
    residua data info data/corpus
    """
    from residua.data import Dataset

    opened = Dataset.open(dataset)
    for split in opened.splits.values():
        split.check()
    _describe(opened, sample)


def _tell_findings(opened: Dataset) -> None:
    """Print which documents occur in both splits, and which lines and files were skipped."""
    from residua.data.overlap import overlap_notice
    from residua.reading import counted
    from residua.report.plain import printable

    if "validation" in opened.splits:
        typer.echo(overlap_notice(opened.description.get("overlap"), opened.split("validation").documents))
    for entry in opened.description.get("skipped", ()):
        how = "partly skipped" if entry.get("partial") else "skipped"
        skipped = f"{counted(entry['count'], entry['unit'])} {how} ({entry['kind']})"
        typer.echo(printable(f"{skipped}, the first: {entry['first']}"))


def _tell_fewer(size: int, target: int) -> None:
    """Report a BPE with fewer entries than requested."""
    if size < target:
        typer.echo(f"the vocabulary has {size:,} entries, fewer than {target:,}: the text has no more pairs to merge")


def _describe(opened: Dataset, sample: int) -> None:
    from residua.reading import counted
    from residua.report.plain import printable

    typer.echo(f"{opened.path}: vocabulary {opened.vocab_size:,}, tokenizer {opened.tokenizer_hash[:12]}")
    for name, split in opened.splits.items():
        tokens, documents = counted(split.tokens, "token"), counted(split.documents, "document")
        typer.echo(
            f"  {printable(name):<10} {tokens:>21}  {documents:>20}  "
            f"{opened.bytes_per_token(name):.2f} bytes/token  {counted(len(split.shards), 'shard')}"
        )
    for name, split in opened.splits.items():
        if sample > 0:
            text = opened.tokenizer.decode(split.read(0, min(sample, split.tokens)))
            typer.echo(f"\n{printable(name)} begins:\n{printable(text)}")
