"""`residua bench`: speed and accuracy of training steps, decoding and operators on this machine."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from residua.cli.options import Device, Overrides, Preset, argument, check_file, option
from residua.errors import UserError
from residua.reading import toml_string

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Measure training steps, prefill, decoding and operators on this device.\n\n"
    "Example: residua bench step mgr-s-prenorm --accumulate 4",
)

FROM_PRESET = "the preset's"
Out = Annotated[Path | None, option("Write everything measured to this JSON file.", callback=check_file)]


@app.command()
def step(
    preset: Preset,
    overrides: Overrides = None,
    compare: Annotated[
        list[str] | None,
        option(
            "Time several cases in one run, with ratios to the first. A case combines variants, overrides and "
            "backend=reference or parallel=shard, separated by spaces.",
            metavar="CASE,CASE,...",
        ),
    ] = None,
    micro_batch: Annotated[int | None, option("Sequences per micro-batch.", default=FROM_PRESET, min=1)] = None,
    sequence: Annotated[int | None, option("Tokens per sequence.", default=FROM_PRESET, min=1)] = None,
    accumulate: Annotated[int | None, option("Micro-batches per step.", default=FROM_PRESET, min=1)] = None,
    compiled: Annotated[
        bool | None, option("Compile the model, as training does.", "--compile/--no-compile", default="on a GPU")
    ] = None,
    steps: Annotated[int, option("Steps to time.", min=1)] = 20,
    warmup: Annotated[int, option("Untimed steps, after the first one.", min=0)] = 3,
    rounds: Annotated[
        int | None,
        option(
            "Alternate between the cases for this many rounds of --steps each; all are compiled first, in parallel.",
            default="one case at a time",
            min=1,
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
    from residua.config.variants import changed

    options = {"train.micro_batch": micro_batch, "data.sequence": sequence, "train.accumulate": accumulate}
    switches = {"train.compile": {None: None, True: "on", False: "off"}[compiled]}
    changes = [f"{key}={value}" for key, value in {**options, **switches}.items() if value is not None]
    base = changed(RunConfig.find(preset), [*(overrides or []), *changes])

    from residua.bench import show
    from residua.bench.operators import measure_ceilings
    from residua.bench.step import bench_step, read_cases
    from residua.bench.turns import bench_turns
    from residua.machine import choose_device

    cases = read_cases(base, [case for text in compare or [] for case in text.split(",")])
    device = choose_device(base.train.device, "train.device")
    bench = show.Bench(device, out)
    with show.BenchProgress() as progress:
        ceilings = measure_ceilings(device)
        if rounds is None:
            results = bench_step(cases, device, steps=steps, warmup=warmup, tell=progress.tell)
        else:
            results = bench_turns(cases, rounds=rounds, steps=steps, warmup=warmup, tell=progress.tell)
    bench.print_device(ceilings)
    bench.console.print(show.describe_step(base))
    show.print_steps(bench.console, results)
    config = base.model_dump(mode="json")
    bench.save("step", ceilings=asdict(ceilings), config=config, results=show.step_rows(results))


@app.command()
def curve(
    preset: Preset,
    overrides: Overrides = None,
    steps: Annotated[int, option("Steps of each run.", min=1)] = 200,
    data: Annotated[Path | None, option("A folder made by `residua data prepare`.", default=FROM_PRESET)] = None,
    out: Out = None,
) -> None:
    """Train twice with the fused operators and once with the references; compare losses, and check repeats bit for bit.

    \b
    residua bench curve mini-mgr
    residua bench curve mini-full --data text --out curve.json
    residua bench curve tiny-block train.micro_batch=4 --steps 20
    """
    from residua.config.run import RunConfig
    from residua.config.variants import changed

    config = changed(RunConfig.find(preset), overrides or [])
    warmup = min(config.train.schedule.warmup, steps // 4)
    changes = [f"train.steps={steps}", f"train.schedule.warmup={warmup}", "train.determinism=exact"]
    if data is not None:
        changes.append(f"data.path={toml_string(data.resolve())}")
    config = config.override(changes)

    from residua.bench import show
    from residua.bench.curve import bench_curve, curve_facts, print_curves
    from residua.data.source import open_data
    from residua.machine import choose_device

    device = choose_device(config.train.device, "train.device")
    dataset, bench = open_data(config), show.Bench(device, out)
    with show.BenchProgress() as progress:
        result = bench_curve(config, dataset, device, tell=progress.tell)
    bench.print_device()
    print_curves(bench.console, config, device, result)
    bench.save("curve", **curve_facts(config, result))


MODELS = ("mgr-s-prenorm", "mgr-l-prenorm")
Presets = Annotated[list[str] | None, argument("Models to time.", default=" ".join(MODELS), metavar="[PRESET ...]")]
EachModelsVariants = Annotated[
    str, option("Variants of each model, as in `bench step`; ratios to the first.", metavar="CASE,CASE,...")
]


@app.command()
def decode(
    presets: Presets = None,
    compare: EachModelsVariants = "prenorm,block_attnres,mgr",
    batch: Annotated[
        list[int] | None, option("Rows per step; may be given several times.", default="1 and 64", min=1)
    ] = None,
    filled: Annotated[int, option("Tokens in the cache of each row.", min=1)] = 512,
    engine: Annotated[
        list[str] | None,
        option("Engine for a step; may be given several times.", default="auto", metavar="auto|eager|graph|compile"),
    ] = None,
    rounds: Annotated[int, option("Timed rounds of 8 steps per case.", min=1)] = 30,
    device: Device = "auto",
    out: Out = None,
) -> None:
    """Time a decoding step of several variants, one token per row.

    \b
    residua bench decode
    residua bench decode mgr-s-prenorm --compare prenorm,block_attnres,mgr,full_attnres --batch 1 --out decode.json
    residua bench decode mgr-s-prenorm --engine eager --engine graph --engine compile
    """
    from residua.bench.inference import bench_decode, bench_each, print_decode
    from residua.bench.show import Bench
    from residua.generate.engine import resolve_engine
    from residua.machine import choose_device

    where = choose_device(device, "--device")
    sizes: dict[str, list[Any]] = {
        "engine": [resolve_engine(name, where) for name in engine or ["auto"]],
        "batch": batch or [1, 64],
    }
    bench, run = Bench(where, out), partial(bench_decode, filled=filled, rounds=rounds)
    timed, ceilings = bench_each(presets or MODELS, compare, sizes, run, where)
    bench.print_device(ceilings)
    print_decode(bench.console, timed, ceilings)
    rows = [asdict(each) | {"bytes_per_second": each.bytes_per_second} for each in timed]
    settings = {"filled": filled, "rounds": rounds, "cases": compare}
    bench.save("decode", ceilings=asdict(ceilings), settings=settings, results=rows)


@app.command()
def prefill(
    presets: Presets = None,
    compare: EachModelsVariants = "prenorm,block_attnres,full_attnres,mgr",
    batch: Annotated[
        list[int] | None, option("Prompts per batch; may be given several times.", default="1 and 8", min=1)
    ] = None,
    length: Annotated[
        list[int] | None, option("Tokens per prompt; may be given several times.", default="128 and 1024", min=1)
    ] = None,
    engine: Annotated[
        list[str] | None,
        option("Engine for the prefill; may be given several times.", default="auto", metavar="auto|eager|graph"),
    ] = None,
    rounds: Annotated[int, option("Timed rounds per case.", min=1)] = 30,
    peers: Annotated[
        bool, option("Also time the Llama of transformers at the same shape, if installed.", "--peers/--no-peers")
    ] = True,
    device: Device = "auto",
    out: Out = None,
) -> None:
    """Time the prefill of several variants, from the prompts to the first token, as `residua generate` runs it.

    \b
    residua bench prefill
    residua bench prefill mgr-s-prenorm --batch 8 --length 1024 --length 4096 --out prefill.json
    residua bench prefill mgr-s-prenorm --compare prenorm,mgr --engine eager --engine auto --no-peers
    """
    from residua.bench.inference import bench_each, bench_prefill, print_prefill
    from residua.bench.show import Bench
    from residua.generate.engine import resolve_engine
    from residua.machine import choose_device

    where = choose_device(device, "--device")
    engines = [resolve_engine(name, where, ("auto", "eager", "graph")) for name in engine or ["auto"]]
    sizes: dict[str, list[Any]] = {"engine": engines, "batch": batch or [1, 8], "length": length or [128, 1024]}
    bench, run = Bench(where, out), partial(bench_prefill, rounds=rounds, peers=peers)
    timed, ceilings = bench_each(presets or MODELS, compare, sizes, run, where)
    bench.print_device(ceilings)
    print_prefill(bench.console, timed)
    rows = [asdict(each) | {"tokens_per_second": each.tokens_per_second} for each in timed]
    settings = {"rounds": rounds, "cases": compare}
    bench.save("prefill", ceilings=asdict(ceilings), settings=settings, results=rows)


@app.command(name="ops")
def operators(
    names: Annotated[
        list[str] | None,
        argument(
            "Operators to time, or `depth` for all junctions of a model.", default="all", metavar="[OPERATOR ...]"
        ),
    ] = None,
    tokens: Annotated[int, option("Tokens per call.", min=1)] = 32_768,
    width: Annotated[int, option("Channels.", min=1)] = 768,
    streams: Annotated[int, option("Number of streams for multi_gate.", min=2)] = 4,
    sources: Annotated[int, option("Number of sources for depth_attention.", min=1)] = 12,
    sublayers: Annotated[int, option("Number of sublayers for `depth`.", min=4)] = 24,
    vocabulary: Annotated[int, option("Vocabulary size for the cross-entropies.", min=2)] = 50_304,
    precision: Annotated[str, option("Type of the inputs: bfloat16 or float32.", default="bfloat16 on a GPU")] = "",
    implementations: Annotated[
        str, option("What to time: fused, reference, compiled (the reference under torch.compile).")
    ] = "fused,reference",
    repeats: Annotated[int, option("Timed repetitions of each.", min=1)] = 50,
    out: Out = None,
) -> None:
    """Time the forward and backward passes of operators, as a share of the device's limits, and of installed peers.

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
    suite.run_suite(plan, repeats, out)


@app.command()
def fp8(
    sizes: Annotated[
        str, option("Input and output widths of the linear layers.", metavar="IN:OUT,...")
    ] = "512:2048,1024:4096,2048:8192,4096:4096,4096:16384,8192:8192",
    tokens: Annotated[int, option("Tokens per call.", min=1)] = 8192,
    repeats: Annotated[int, option("Timed repetitions of each.", min=1)] = 50,
    out: Out = None,
) -> None:
    """Time FP8 linear layers against bf16 at several sizes, and compare their results with the simulation.

    \b
    residua bench fp8
    residua bench fp8 --sizes 768:3072,3072:768 --tokens 32768 --out fp8.json
    """
    try:
        widths = [(int(inputs), int(outputs)) for inputs, outputs in (size.split(":") for size in sizes.split(","))]
    except ValueError:
        widths = []
    if not widths or min(map(min, widths)) < 1:
        raise UserError(f"--sizes {sizes} is not a list of shapes: write IN:OUT pairs, as in 512:2048,4096:4096.")
    from residua.bench import show
    from residua.bench.fp8 import bench_linear, print_linear
    from residua.machine import choose_device

    bench = show.Bench(choose_device("auto"), out)
    with show.BenchProgress() as progress:
        results = bench_linear(tokens, widths, bench.device, repeats=repeats, tell=progress.tell)
    bench.print_device()
    print_linear(bench.console, results)
    bench.save("fp8", results=[asdict(result) for result in results])


@app.command(name="plan")
def plan_run(
    preset: Preset,
    overrides: Overrides = None,
    gpus: Annotated[int, option("Number of devices.", min=1, max=1_000_000)] = 8,
    memory: Annotated[float, option("Memory of one device, in GiB.", min=1)] = 140,
    flops: Annotated[float, option("TFLOP/s reached in a step: the MFU of `bench step` times the peak.", min=1)] = 500,
    link: Annotated[float, option("GB/s that a device sends within its node.", min=1)] = 300,
    between: Annotated[float, option("GB/s that a device sends to other nodes.", min=0.1)] = 50,
    node: Annotated[int, option("Devices per node.", min=1, max=1024)] = 8,
    latency: Annotated[float, option("Latency of a message, in microseconds.", min=0)] = 10,
    host: Annotated[float, option("Host memory of a node, in GiB.", min=1)] = 2000,
    bandwidth: Annotated[
        float, option("Copy bandwidth of a device's memory in GB/s, reads plus writes.", min=1)
    ] = 4250,
    torchtitan: Annotated[
        bool, option("Include tensor and context parallelism, which need torchtitan.", "--torchtitan")
    ] = False,
    rows: Annotated[int, option("How many meshes to show.", min=1)] = 24,
    out: Out = None,
) -> None:
    """Estimate memory, traffic and step time for every mesh of the given devices, without running anything.

    \b
    residua bench plan mgr-l-block8 --gpus 8
    residua bench plan mgr-l-full train.accumulate=64 --gpus 32 --between 25
    residua bench plan outlier-2b-full --gpus 64 --torchtitan
    residua bench plan exoformer-e --gpus 4 --memory 80 --out plan.json
    """
    from residua.config.run import RunConfig
    from residua.config.variants import changed

    config = changed(RunConfig.find(preset), overrides or [])

    from residua.bench import show
    from residua.bench.plan import GIB, Machine, plan, plan_report, print_plans
    from residua.report.terminal import open_console

    machine = Machine(
        memory * GIB, flops * 1e12, link * 1e9, between * 1e9, bandwidth * 1e9, node, latency * 1e-6, host * GIB
    )
    plans = plan(config, gpus, machine, engines=torchtitan)
    console = open_console(show.WIDTH)
    print_plans(console, [preset, *(overrides or [])], config, machine, plans, rows)
    show.save_report(console, out, plan_report(config, machine, plans))
