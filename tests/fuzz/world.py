"""Folders of every sort that a command reads, small and complete, and the commands that read each file."""

import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tomli_w

from tests.fuzz.child import command, in_child
from tests.trained import WORDS

MODEL = [
    "model.vocab_size=320", "model.context=16", "model.layers=2", "model.width=16", "model.attention.heads=2",
    "model.ffn.hidden=32",
]  # fmt: skip
RUN = [
    *MODEL, 'data.path="data"', "data.validation_tokens=64", "train.device=cpu", "train.steps=4", "train.micro_batch=2",
    "train.schedule.warmup=1", "train.log_every=1", "train.validate_every=2", "train.save_every=2",
]  # fmt: skip
RUN_TOML = """extends = "tiny"

[model]
layers = 2
width = 32
context = 32

[model.attention]
kind = "softmax"
heads = 2

[model.topology]
kind = "multi_gate"
streams = 2

[train]
steps = 3

[train.optimizer]
kind = "muon"
lr = 0.01

[train.schedule]
kind = "cosine"
warmup = 1
"""
STUDY = ["model.width=16", "model.attention.heads=2", "model.ffn.hidden=32", "model.context=16", "model.layers=2"]


@dataclass(frozen=True)
class Reader:
    """A command, and the files that it reads, as patterns below the folder it is started in."""

    name: str
    arguments: Sequence[str]
    files: Sequence[str]
    writes: bool = False
    """Whether it may write something before it fails: it trains, or starts training."""
    also: Sequence[str] = ()
    """Words that identify the file as well as its name."""


OF_STUDY = ("set: ", "this study needs", "is not a prepared dataset", "made by residua data prepare")
"""A study file that is valid but another may name other data, or another study than the one in the folder."""
CHECKPOINT = "run/checkpoints/step-4"
DATA = ("data/dataset.json", "data/tokenizer.json", "data/*.bin")
WEIGHTS = ("run/config.toml", f"{CHECKPOINT}/model.safetensors")
TEXT = ("--text", "text.txt", "--tokens", "40", "--ablations", "none")
GENERATE = ("--prompt", "a", "--tokens", "2", "--device", "cpu")
QUICK = (
    Reader(
        "train --resume",
        ("train", "--resume", "--out", "run", "train.steps=5"),
        (
            *WEIGHTS, *DATA, f"{CHECKPOINT}/optimizer.safetensors", f"{CHECKPOINT}/state.json", "run/metrics.jsonl",
            "run/environment.json", "run/tokenizer.json",
        ),
        writes=True,
    ),
    Reader("generate", ("generate", "run", *GENERATE), (*WEIGHTS, "run/tokenizer.json")),
    Reader(
        "generate best",
        ("generate", "run", "--checkpoint", "best", *GENERATE),
        ("run/checkpoints/*/state.json",),
    ),
    Reader("generate --file", ("generate", "run", "--file", "prompts.txt", "--tokens", "2"), ("prompts.txt",),
           also=("prompt",)),
    Reader("eval", ("eval", "run", "--tokens", "40"), (*WEIGHTS, *DATA, "run/tokenizer.json")),
    Reader("eval --tasks", ("eval", "run", "--tasks", "mine", "--task-dir", "tasks", "--shots", "1"), ("tasks/*",)),
    Reader("data info", ("data", "info", "data"), DATA),
    Reader("data prepare", ("data", "prepare", "corpus.jsonl", "--tokenizer", "tokenizer.json", "--out", "new"),
           ("corpus.jsonl", "tokenizer.json")),
    Reader("bench plan", ("bench", "plan", "mine.toml", "--gpus", "1"), ("mine.toml",)),
    Reader("compare --plan", ("compare", "study.toml", "--plan"), ("study.toml", *DATA), also=OF_STUDY),
)  # fmt: skip
FULL = (
    *QUICK,
    Reader("generate sharded", ("generate", "sharded", *GENERATE),
           ("sharded/checkpoints/step-4/shards/*", "sharded/checkpoints/step-4/state.json", "sharded/config.toml")),
    Reader("export", ("export", "run", "--out", "new"), (*WEIGHTS, "run/tokenizer.json")),
    Reader("diagnose", ("diagnose", "run", *TEXT),
           (*WEIGHTS, "run/tokenizer.json", "text.txt")),
    Reader("quantize", ("quantize", "run", "--out", "new", "--probes", "0"), (*WEIGHTS, *DATA, "run/tokenizer.json")),
    Reader("generate exported", ("generate", "exported", *GENERATE),
           ("exported/*.json", "exported/*.safetensors")),
    Reader("diagnose exported", ("diagnose", "exported", *TEXT),
           ("exported/*.json", "exported/*.safetensors")),
    Reader("eval quantized", ("eval", "quantized", "--data", "data", "--tokens", "40"),
           ("quantized/*.json", "quantized/*.safetensors", "quantized/*.toml")),
    Reader("diagnose Hugging Face", ("diagnose", "hf", *TEXT),
           ("hf/*.json", "hf/*.safetensors")),
    Reader("import", ("import", "hf", "--out", "new"), ("hf/*.json", "hf/*.safetensors")),
    Reader("compare", ("compare", "study.toml", "--out", "study"),
           ("study.toml", "study/study.toml", "study/runs/*/metrics.jsonl", "study/runs/*/inspection.json",
            "study/runs/*/config.toml", "study/runs/*/quantized.json", "study/results.json"),
           writes=True, also=OF_STUDY),
)  # fmt: skip


def build(root: Path, *, full: bool) -> Path:
    """Make all folders below `root`, by the commands that make them."""
    root.mkdir(parents=True)
    source = random.Random(0)
    texts = [" ".join(source.choices(WORDS, k=30)) for _ in range(20)]
    (root / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (root / "text.txt").write_text("\n".join(texts))
    (root / "prompts.txt").write_text("\n".join(WORDS) + "\n")
    (root / "mine.toml").write_text(RUN_TOML)
    (root / "tasks").mkdir()
    (root / "tasks" / "mine.jsonl").write_text("".join(_question(number) for number in range(6)))
    prepare = ["data", "prepare", "corpus.jsonl", "--tokenizer", "bytes", "--out", "data", "--holdout", "0.3"]
    _do(root, *prepare, "--shard-tokens", "1500")
    os.link(root / "data" / "tokenizer.json", root / "tokenizer.json")
    _do(root, "train", "tiny", "--out", "run", *RUN)
    study = {"name": "small", "base": "tiny", "data": "data", "seeds": 1, "variants": ["prenorm", "mgr"]}
    changes = {"set": [*STUDY, *RUN[len(MODEL) :]], "match": {"kind": "none"}}
    (root / "study.toml").write_text(tomli_w.dumps(study | changes))
    if full:
        in_child(lambda: _shard(root), root)
        _do(root, "export", "run", "--out", "exported")
        _do(root, "quantize", "run", "--out", "quantized", "--probes", "0")
        in_child(lambda: _hugging_face(root / "hf"), root)
        _do(root, "compare", "study.toml", "--out", "study", "--quantize", "fp8")
    return root


def _question(number: int) -> str:
    split = "train" if number < 2 else "validation"
    record = {"question": WORDS[number], "choices": WORDS[number : number + 3], "answer": number % 3, "split": split}
    return json.dumps(record) + "\n"


def _do(root: Path, *arguments: str) -> None:
    done = command(arguments, root)
    assert done.code == 0, f"residua {' '.join(arguments)} ended with {done.code}:\n{done.output[-2000:]}{done.errors}"


def _shard(root: Path) -> None:
    """The run once more, its checkpoint in shards as ranks write them."""
    import shutil

    import torch
    import torch.distributed as dist

    from residua.config.run import RunConfig
    from residua.model.decoder import build as build_model
    from residua.storage.checkpoint import checkpoints, read_checkpoint
    from residua.storage.shard_files import Saver
    from residua.train.step import build_step

    config = RunConfig.from_toml(root / "run/config.toml")
    step = build_step(build_model(config.model), config.train, torch.device("cpu"))
    last = checkpoints(root / "run")[-1]
    read_checkpoint(last.path, step.model, step.optimizer)
    shutil.copytree(root / "run", root / "sharded", ignore=shutil.ignore_patterns("checkpoints"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    saver = Saver()
    saver.save(root / "sharded", last.step, step.model, step.optimizer, last.state, keep=1)
    saver.settle()
    dist.destroy_process_group()


def _hugging_face(folder: Path) -> None:
    """A Qwen3 in several files with an index."""
    from residua.data import Tokenizer
    from tests.diagnose.models import build as build_model

    build_model("qwen3").save_pretrained(folder, max_shard_size="30KB")
    Tokenizer.bytes().save(folder / "tokenizer.json")
