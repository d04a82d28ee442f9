"""`residua bench`: how fast the training step and the operators run on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Measure the training step and the operators against what this device can do.\n\n"
    "Example: residua bench step mgr-s-prenorm --accumulate 4",
)

PRESETS = "the preset's"
Out = Annotated[Path | None, typer.Option(show_default=False, help="Write everything measured to this JSON file.")]


@app.command()
def step(
    preset: Annotated[str, typer.Argument(metavar="PRESET", help="A preset's name or a run's TOML file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[section.key=value ...]", show_default=False, help="Changes to the configuration."),
    ] = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CASE,CASE,...",
            show_default=False,
            help="Time several variants in this run, with ratios to the first. A case is known variants, overrides "
            "and backend=reference, separated by spaces.",
        ),
    ] = None,
    micro_batch: Annotated[int | None, typer.Option(show_default=PRESETS, help="Sequences at once.")] = None,
    sequence: Annotated[int | None, typer.Option(show_default=PRESETS, help="Tokens in a sequence.")] = None,
    accumulate: Annotated[int | None, typer.Option(show_default=PRESETS, help="Micro-batches in a step.")] = None,
    compiled: Annotated[
        bool | None,
        typer.Option("--compile/--no-compile", show_default="on a GPU", help="Compile the model, as training does."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to time.")] = 20,
    warmup: Annotated[int, typer.Option(min=0, help="Steps before those, after the first.")] = 3,
    out: Out = None,
) -> None:
    """Time the whole training step on random tokens, as `residua train` runs it.

    \b
    residua bench step mgr-s-prenorm --accumulate 4
    residua bench step mgr-s-prenorm --accumulate 4 --compare prenorm,block_attnres,full_attnres,mgr --out step.json
    residua bench step mini --compare "mgr,mgr backend=reference,mgr model.topology.streams=8"
    """
    from rich.console import Console

    from residua.train.config import RunConfig

    asked = {"train.micro_batch": micro_batch, "data.sequence": sequence, "train.accumulate": accumulate}
    asked_words = {"train.compile": {None: None, True: "on", False: "off"}[compiled]}
    changes = [f"{key}={value}" for key, value in {**asked, **asked_words}.items() if value is not None]
    base = RunConfig.find(preset).override([*(overrides or []), *changes])

    from residua.bench import show
    from residua.bench.ceilings import measure_ceilings
    from residua.bench.step import bench_step, read_cases
    from residua.train.environment import describe_environment
    from residua.train.step import choose_device

    cases = read_cases(base, [case for text in compare or [] for case in text.split(",")])
    device = choose_device(base.train)
    environment, console = describe_environment(device), show.open_console()
    with Console(stderr=True).status("measuring this device") as status:
        ceilings = measure_ceilings(device)
        results = bench_step(cases, device, steps=steps, warmup=warmup, tell=status.update)
    show.print_ceilings(console, environment, ceilings)
    console.print(show.describe_step(base))
    show.print_steps(console, results)
    if out is not None:
        show.write_json(out, show.step_report(environment, ceilings, base.model_dump(mode="json"), results))
        console.print(f"written to {out}", soft_wrap=True)


@app.command(name="ops")
def operators(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[OPERATOR ...]", show_default="all", help="Operators, and `depth` for whole depths."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens at once.")] = 32_768,
    width: Annotated[int, typer.Option(min=1, help="Channels.")] = 768,
    streams: Annotated[int, typer.Option(min=2, help="Streams of multi_gate.")] = 4,
    sources: Annotated[int, typer.Option(min=1, help="Sources of depth_attention.")] = 12,
    sublayers: Annotated[int, typer.Option(min=4, help="Sublayers of whole depths.")] = 24,
    vocabulary: Annotated[int, typer.Option(min=2, help="Vocabulary of linear_cross_entropy.")] = 50_304,
    precision: Annotated[str, typer.Option(show_default="bfloat16 on a GPU", help="bfloat16 or float32.")] = "",
    implementations: Annotated[
        str, typer.Option(help="Any of fused, reference and compiled (the reference under torch.compile).")
    ] = "fused,reference",
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each.")] = 50,
    out: Out = None,
) -> None:
    """Time operators forward and backward, as a share of what this device can do, with peers that are installed.

    \b
    residua bench ops
    residua bench ops multi_gate gated_norm --width 1280 --streams 8 --out ops.json
    residua bench ops depth --implementations fused,compiled
    """
    from rich.console import Console

    from residua.bench import suite

    settings = {
        "tokens": tokens,
        "width": width,
        "streams": streams,
        "sources": sources,
        "sublayers": sublayers,
        "vocabulary": vocabulary,
    }
    plan = suite.plan(names or [], implementations.split(","), precision, settings)
    with Console(stderr=True).status("measuring this device") as status:
        report = suite.run(plan, repeats, tell=status.update)
    suite.show_report(report, out)
