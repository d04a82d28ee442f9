"""`residua train`: train one model."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from residua.cli.options import Data, Overrides, Threads, argument, complete_preset, option, use_threads
from residua.errors import UserError
from residua.files import is_plain_name, refuse_blocked
from residua.reading import toml_string

if TYPE_CHECKING:
    from residua.config.run import RunConfig
    from residua.train.world import World

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def train(
    source: Annotated[
        str | None,
        argument(
            "A preset from `residua presets`, or a TOML file. Not needed with --resume.",
            metavar="PRESET|FILE.toml",
            autocompletion=complete_preset,
        ),
    ] = None,
    changes: Overrides = None,
    data: Data = None,
    out: Annotated[Path | None, option("Folder of the run.", default="runs/NAME")] = None,
    start: Annotated[Path | None, option("Initialize with the weights of this run.", "--from", metavar="RUN")] = None,
    resume: Annotated[bool, option("Resume the run in --out from its last checkpoint.", "--resume")] = False,
    threads: Threads = None,
    watch: Annotated[bool, option("Serve a live page while the run trains, on this machine only.", "--watch")] = False,
) -> None:
    """Train a model on your text, or by default on the Python standard library.

    \b
    residua train tiny
    residua train mini --data data/wiki --out runs/wiki train.steps=2000
    residua train mini mgr2+exoformer --out runs/mgr2
    residua train tiny model.topology.kind=full_attnres --out runs/full
    residua train my-run.toml --threads 4 --watch
    residua train --resume --out runs/wiki
    residua train --from runs/qwen3 model.topology=multi_gate --data data/wiki --out runs/mgr
    torchrun --nproc-per-node 8 --no-python residua train mgr-l-full parallel.shard=8

    `residua compare --list` lists variants. The vocabulary size is that of the text, unless
    model.vocab_size is given. Ctrl-C saves and stops. --resume continues from there: bit for
    bit on a CPU, and on a GPU with train.determinism=exact.
    """
    from residua.config.variants import overrides

    words = list(changes or [])
    if source is not None and "=" in source:
        words.insert(0, source)
        source = None
    if start is not None:
        folder, config = _retrofit(start, source, words, data, out, resume)
    else:
        folder = out or _default_folder(source)
        refuse_blocked(folder)  # before preparing text
        base = _configuration(source, folder, resume)
        words = overrides(words, base.model)
        config = base.override([*_data_change(data), *words])
        config = config.override(_vocabulary_change(config, source, words, folder, resume))
    with _page(folder) if watch and os.environ.get("RANK", "0") == "0" else nullcontext():
        _run(_placed(config), folder, resume, threads)


def _page(folder: Path) -> AbstractContextManager[None]:
    """Serve the live page of a run while it trains."""
    from residua.watch.server import serve_page

    return serve_page(folder, lambda line: print(line, flush=True))


def _retrofit(
    start: Path, source: str | None, changes: list[str], data: Path | None, out: Path | None, resume: bool
) -> tuple[Path, RunConfig]:
    """The folder and configuration of a run that starts from the weights of another."""
    from residua.config.run import RunConfig
    from residua.config.variants import overrides, with_eps
    from residua.storage.load import start_changes

    if source is not None:
        raise UserError(f"--from takes the model and the recipe from {start}: leave {source} out.")
    if resume:
        raise UserError("--from cannot be combined with --resume, which restores the weights: leave --from out.")
    if out is None:
        raise UserError("choose the new run's folder with --out.")
    base_file, begin = start_changes(start)
    base = RunConfig.from_toml(base_file)
    changes = overrides(changes, base.model)
    changed = base.override([*begin, *_data_change(data), *changes])
    same_kind = changed.model.topology.kind == base.model.topology.kind
    exact = [] if same_kind or changed.model.repeats else ["model.reader_eps=sum"]
    return out, changed.override([*with_eps(base.model.norm, changed.model.norm, changes), *exact, *changes])


def _run(config: RunConfig, folder: Path, resume: bool, threads: int | None) -> None:
    from residua.report.failure import describe, show
    from residua.train.health import TrainingStopped
    from residua.train.trainer import train as train_run

    use_threads(threads)
    try:
        train_run(config, folder, resume=resume, world=_ranks(config, folder))
    except TrainingStopped as stop:
        show(describe(stop, expected=True))
        raise typer.Exit(stop.exit_code) from None


def _ranks(config: RunConfig, folder: Path) -> World | None:
    """The processes of a distributed run; a single process avoids importing torch.distributed, which takes seconds."""
    if config.parallel.ranks == 1:
        return None
    from residua.distributed.world import open_world

    return open_world(config, folder)


def _configuration(source: str | None, folder: Path, resume: bool) -> RunConfig:
    """The run's configuration, from the named source or, with --resume alone, from the run's folder."""
    from residua.config.run import RunConfig

    if source is not None:
        return RunConfig.find(source)
    if not resume:
        raise UserError("nothing to train was named: give a preset (`residua presets` lists them) or a TOML file.")
    from residua.storage.run import saved_config

    return saved_config(folder)


def _vocabulary_change(
    config: RunConfig, source: str | None, changes: list[str], folder: Path, resume: bool
) -> list[str]:
    """The override that sets the vocabulary size of the text, unless it is given or the run has begun."""
    from residua.data.source import names_vocabulary, vocabulary
    from residua.storage.run import saved_config

    if source is None or names_vocabulary(source, changes):
        return []
    return [f"model.vocab_size={saved_config(folder).model.vocab_size if resume else vocabulary(config.data)}"]


def _default_folder(source: str | None) -> Path:
    if source is None:
        raise UserError(
            "nothing to train was named: give a preset (`residua presets` lists them), or --resume "
            "with the --out of a run."
        )
    name = Path(source).stem
    if not is_plain_name(name):
        raise UserError(f"{source!r} has no name that could name the run's folder: choose one with --out.")
    return Path("runs") / name


def _placed(config: RunConfig) -> RunConfig:
    """The configuration with the absolute path of its text, so that the run can be resumed from any folder."""
    path = config.data.path
    return config if path is None or Path(path).is_absolute() else config.override(_data_change(Path(path)))


def _data_change(data: Path | None) -> list[str]:
    """--data as an override: absolute and quoted, so that a folder called 2024 stays a string."""
    return [] if data is None else [f"data.path={toml_string(data.resolve())}"]
