"""`residua bench`: speed and exactness of training steps, decoding and operators on this machine."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from residua.cli.options import Device, Overrides, Preset, check_file
from residua.errors import UserError
from residua.reading import toml_string

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Measure training steps, prefill, decoding and operators on this device.\n\n"
    "Example: residua bench step mgr-s-prenorm --accumulate 4",
)

FROM_PRESET = "the preset's"
Out = Annotated[
    Path | None,
    typer.Option(show_default=False, callback=check_file, help="Write everything measured to this JSON file."),
]


@app.command()
def step(
    preset: Preset,
    overrides: Overrides = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CASE,CASE,...",
            show_default=False,
            help="Time several variants in this run, with ratios to the first. A case is known variants, overrides "
            "and backend=reference or parallel=shard, separated by spaces.",
        ),
    ] = None,
    micro_batch: Annotated[int | None, typer.Option(min=1, show_default=FROM_PRESET, help="Sequences at once.")] = None,
    sequence: Annotated[int | None, typer.Option(min=1, show_default=FROM_PRESET, help="Tokens in a sequence.")] = None,
    accumulate: Annotated[
        int | None, typer.Option(min=1, show_default=FROM_PRESET, help="Micro-batches in a step.")
    ] = None,
    compiled: Annotated[
        bool | None,
        typer.Option("--compile/--no-compile", show_default="on a GPU", help="Compile the model, as training does."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to time.")] = 20,
    warmup: Annotated[int, typer.Option(min=0, help="Untimed steps, after the first one.")] = 3,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default="one case after the other",
            help="Let the cases take turns this many times, --steps each: all are compiled first, side by side.",
        ),
    ] = None,
    out: Out = None,
) -> None:
    """Time the whole training step on random tokens, as `residua train` runs it.

    \b
    residua bench step mgr-s-prenorm --accumulate 4
    residua bench step mgr-s-prenorm --accumulate 4 --compare prenorm,block_attnres,full_attnres,mgr --out step.json
    residua bench step mini --compare "mgr,mgr backend=reference,mgr model.topology.streams=8"
    residua bench step mini --compare prenorm,mgr,mhc --rounds 5 --steps 5
    """
    from residua.config.run import RunConfig

    asked = {"train.micro_batch": micro_batch, "data.sequence": sequence, "train.accumulate": accumulate}
    switches = {"train.compile": {None: None, True: "on", False: "off"}[compiled]}
    changes = [f"{key}={value}" for key, value in {**asked, **switches}.items() if value is not None]
    base = RunConfig.find(preset).override([*(overrides or []), *changes])

    from residua.bench import show
    from residua.bench.step import bench_step, read_cases
    from residua.bench.timing import measure_ceilings
    from residua.bench.turns import bench_turns
    from residua.machine import choose_device
    from residua.train.environment import describe_environment

    cases = read_cases(base, [case for text in compare or [] for case in text.split(",")])
    device = choose_device(base.train.device, "train.device")
    environment, console = describe_environment(device), _console()
    with show.BenchProgress() as progress:
        ceilings = measure_ceilings(device)
        if rounds is None:
            results = bench_step(cases, device, steps=steps, warmup=warmup, tell=progress.tell)
        else:
            results = bench_turns(cases, rounds=rounds, steps=steps, warmup=warmup, tell=progress.tell)
    show.print_ceilings(console, environment, ceilings)
    console.print(show.describe_step(base))
    show.print_steps(console, results)
    show.save_report(console, out, show.step_report(environment, ceilings, base.model_dump(mode="json"), results))


@app.command()
def curve(
    preset: Preset,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each run.")] = 200,
    data: Annotated[
        Path | None, typer.Option(show_default=FROM_PRESET, help="A folder made by `residua data prepare`.")
    ] = None,
    out: Out = None,
) -> None:
    """Train twice on the fused operators and once on the references: compare losses, and bits between repeats.

    \b
    residua bench curve mini-mgr
    residua bench curve mini-full --data text --out curve.json
    residua bench curve tiny-block train.micro_batch=4 --steps 20
    """
    from residua.config.run import RunConfig

    config = RunConfig.find(preset).override(overrides or [])
    warmup = min(config.train.schedule.warmup, steps // 4)
    asked = [f"train.steps={steps}", f"train.schedule.warmup={warmup}", "train.determinism=exact"]
    if data is not None:
        asked.append(f"data.path={toml_string(data.resolve())}")
    config = config.override(asked)

    from residua.bench import show
    from residua.bench.curve import bench_curve, curve_report, print_curves
    from residua.data.source import open_data
    from residua.machine import choose_device
    from residua.train.environment import describe_environment

    device = choose_device(config.train.device, "train.device")
    dataset, environment, console = open_data(config), describe_environment(device), _console()
    with show.BenchProgress() as progress:
        result = bench_curve(config, dataset, device, tell=progress.tell)
    show.print_device(console, environment)
    print_curves(console, config, device, result)
    show.save_report(console, out, curve_report(environment, config, result))


MODELS = ("mgr-s-prenorm", "mgr-l-prenorm")
Presets = Annotated[
    list[str] | None,
    typer.Argument(metavar="[PRESET ...]", show_default=" ".join(MODELS), help="Models to time."),
]
EachModelsVariants = Annotated[
    str, typer.Option(metavar="CASE,CASE,...", help="Variants of each model, as in `bench step`; ratios to the first.")
]


@app.command()
def decode(
    presets: Presets = None,
    compare: EachModelsVariants = "prenorm,block_attnres,mgr",
    batch: Annotated[
        list[int] | None, typer.Option(min=1, show_default="1 and 64", help="Rows at once; may be given several times.")
    ] = None,
    filled: Annotated[int, typer.Option(min=1, help="Tokens of each row in the cache.")] = 512,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            metavar="auto|eager|graph|compile", show_default="auto", help="How a step runs; may be given several times."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds of 8 steps of each.")] = 30,
    device: Device = "auto",
    out: Out = None,
) -> None:
    """Time a decoding step, one token per row, of several variants side by side.

    \b
    residua bench decode
    residua bench decode mgr-s-prenorm --compare prenorm,block_attnres,mgr,full_attnres --batch 1 --out decode.json
    residua bench decode mgr-s-prenorm --engine eager --engine graph --engine compile
    """
    from residua.bench import show
    from residua.bench.decode import bench_decode, decode_report, print_decode
    from residua.bench.step import read_models
    from residua.bench.timing import measure_ceilings
    from residua.generate.engine import resolve_engine
    from residua.machine import choose_device
    from residua.train.environment import describe_environment

    where = choose_device(device, "--device")
    engines = [resolve_engine(name, where) for name in engine or ["auto"]]
    cases = read_models(presets or MODELS, compare.split(","))
    environment, console = describe_environment(where), _console()
    results, parts = [], list(product(cases, engines, batch or [1, 64]))
    with show.BenchProgress(len(parts)) as progress:
        ceilings = measure_ceilings(where)
        for name, chosen, rows in parts:
            results += bench_decode(
                name, cases[name], where, batch=rows, filled=filled, engine=chosen, rounds=rounds, tell=progress.tell
            )
            progress.finish_part()
    show.print_ceilings(console, environment, ceilings)
    print_decode(console, results, ceilings)
    settings = {"filled": filled, "rounds": rounds, "cases": compare}
    show.save_report(console, out, decode_report(environment, ceilings, settings, results))


@app.command()
def prefill(
    presets: Presets = None,
    compare: EachModelsVariants = "prenorm,block_attnres,full_attnres,mgr",
    batch: Annotated[
        list[int] | None,
        typer.Option(min=1, show_default="1 and 8", help="Prompts at once; may be given several times."),
    ] = None,
    length: Annotated[
        list[int] | None,
        typer.Option(min=1, show_default="128 and 1024", help="Tokens of each prompt; may be given several times."),
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            metavar="auto|eager|graph", show_default="auto", help="How prompts are read; may be given several times."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds of each.")] = 30,
    peers: Annotated[
        bool, typer.Option("--peers/--no-peers", help="Time transformers' Llama of the same shape, if installed.")
    ] = True,
    device: Device = "auto",
    out: Out = None,
) -> None:
    """Time from prompts to the first token of several variants side by side, as `residua generate` reads prompts.

    \b
    residua bench prefill
    residua bench prefill mgr-s-prenorm --batch 8 --length 1024 --length 4096 --out prefill.json
    residua bench prefill mgr-s-prenorm --compare prenorm,mgr --engine eager --engine auto --no-peers
    """
    from residua.bench import show
    from residua.bench.prefill import bench_prefill, prefill_report, print_prefill
    from residua.bench.step import read_models
    from residua.bench.timing import measure_ceilings
    from residua.generate.engine import resolve_engine
    from residua.machine import choose_device
    from residua.train.environment import describe_environment

    where = choose_device(device, "--device")
    engines = [resolve_engine(name, where, ("auto", "eager", "graph")) for name in engine or ["auto"]]
    cases = read_models(presets or MODELS, compare.split(","))
    environment, console = describe_environment(where), _console()
    results, parts = [], list(product(cases, engines, batch or [1, 8], length or [128, 1024]))
    with show.BenchProgress(len(parts)) as progress:
        ceilings = measure_ceilings(where)
        for name, chosen, rows, tokens in parts:
            results += bench_prefill(
                name, cases[name], where, batch=rows, length=tokens, engine=chosen, rounds=rounds, peers=peers,
                tell=progress.tell,
            )  # fmt: skip
            progress.finish_part()
    show.print_ceilings(console, environment, ceilings)
    print_prefill(console, results)
    settings = {"rounds": rounds, "cases": compare}
    show.save_report(console, out, prefill_report(environment, ceilings, settings, results))


@app.command(name="ops")
def operators(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[OPERATOR ...]", show_default="all", help="Operators, or `depth` for all junctions of a model."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens at once.")] = 32_768,
    width: Annotated[int, typer.Option(min=1, help="Channels.")] = 768,
    streams: Annotated[int, typer.Option(min=2, help="Streams of multi_gate.")] = 4,
    sources: Annotated[int, typer.Option(min=1, help="Sources of depth_attention.")] = 12,
    sublayers: Annotated[int, typer.Option(min=4, help="Sublayers of `depth`.")] = 24,
    vocabulary: Annotated[int, typer.Option(min=2, help="Vocabulary of the cross-entropies.")] = 50_304,
    precision: Annotated[str, typer.Option(show_default="bfloat16 on a GPU", help="bfloat16 or float32.")] = "",
    implementations: Annotated[
        str, typer.Option(help="Any of fused, reference and compiled (the reference under torch.compile).")
    ] = "fused,reference",
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each.")] = 50,
    out: Out = None,
) -> None:
    """Time operators forward and backward, as a share of the device's limits, beside the peers that are installed.

    \b
    residua bench ops
    residua bench ops multi_gate gated_norm --width 1280 --streams 8 --out ops.json
    residua bench ops depth --implementations fused,compiled
    """
    from residua.bench import suite

    settings = {
        "tokens": tokens, "width": width, "streams": streams, "sources": sources, "sublayers": sublayers,
        "vocabulary": vocabulary,
    }  # fmt: skip
    plan = suite.plan(names or [], implementations.split(","), precision, settings)
    suite.conduct(plan, repeats, out)


@app.command()
def fp8(
    sizes: Annotated[
        str, typer.Option(metavar="IN:OUT,...", help="Inputs and outputs of the linear layers.")
    ] = "512:2048,1024:4096,2048:8192,4096:4096,4096:16384,8192:8192",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens at once.")] = 8192,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each.")] = 50,
    out: Out = None,
) -> None:
    """Time FP8 linear layers against bf16 by size, and compare them with the simulation.

    \b
    residua bench fp8
    residua bench fp8 --sizes 768:3072,3072:768 --tokens 32768 --out fp8.json
    """
    try:
        widths = [(int(inputs), int(outputs)) for inputs, outputs in (size.split(":") for size in sizes.split(","))]
    except ValueError:
        widths = []
    if not widths or min(map(min, widths)) < 1:
        raise UserError(f"--sizes {sizes} is not a list like 512:2048,4096:4096.")
    from residua.bench import fp8 as bench
    from residua.bench import show
    from residua.machine import choose_device
    from residua.train.environment import describe_environment

    device = choose_device("auto")
    console, environment = _console(), describe_environment(device)
    with show.BenchProgress() as progress:
        results = bench.bench_linear(tokens, widths, device, repeats=repeats, tell=progress.tell)
    show.print_device(console, environment)
    bench.print_linear(console, results)
    show.save_report(console, out, bench.linear_report(environment, results))


@app.command(name="plan")
def plan_run(
    preset: Preset,
    overrides: Overrides = None,
    gpus: Annotated[int, typer.Option(min=1, max=1_000_000, help="Number of devices.")] = 8,
    memory: Annotated[float, typer.Option(min=1, help="GiB of one device.")] = 140,
    flops: Annotated[
        float, typer.Option(min=1, help="TFLOP/s that a step reaches: the MFU of `bench step` times the peak.")
    ] = 500,
    link: Annotated[float, typer.Option(min=1, help="GB/s that a device sends to others of its node.")] = 300,
    between: Annotated[float, typer.Option(min=0.1, help="GB/s that a device sends to other nodes.")] = 50,
    node: Annotated[int, typer.Option(min=1, max=1024, help="Devices of one node.")] = 8,
    latency: Annotated[float, typer.Option(min=0, help="Microseconds until a message arrives.")] = 10,
    host: Annotated[float, typer.Option(min=1, help="GiB of a node's own memory.")] = 2000,
    bandwidth: Annotated[
        float, typer.Option(min=1, help="GB/s of a copy in a device's memory, read and written bytes added.")
    ] = 4250,
    torchtitan: Annotated[
        bool, typer.Option("--torchtitan", help="Also tensor and context parallelism, which torchtitan runs.")
    ] = False,
    rows: Annotated[int, typer.Option(min=1, help="Meshes to show.")] = 24,
    out: Out = None,
) -> None:
    """Estimate memory, bytes sent and step time for every mesh of a number of devices, without running anything.

    \b
    residua bench plan mgr-l-block8 --gpus 8
    residua bench plan mgr-l-full train.accumulate=64 --gpus 32 --between 25
    residua bench plan outlier-2b-full --gpus 64 --torchtitan
    residua bench plan exoformer-e --gpus 4 --memory 80 --out plan.json
    """
    from residua.config.run import RunConfig

    config = RunConfig.find(preset).override(overrides or [])

    from residua.bench import show
    from residua.bench.plan import GIB, Machine, plan
    from residua.bench.plan_table import plan_report, print_plans

    machine = Machine(
        memory * GIB, flops * 1e12, link * 1e9, between * 1e9, bandwidth * 1e9, node, latency * 1e-6, host * GIB
    )
    plans = plan(config, gpus, machine, engines=torchtitan)
    console = _console()
    print_plans(console, [preset, *(overrides or [])], config, machine, plans, rows)
    show.save_report(console, out, plan_report(config, machine, plans))


def _console() -> Console:
    from residua.bench.show import WIDTH
    from residua.report.terminal import open_console

    return open_console(WIDTH)
