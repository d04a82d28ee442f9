"""Tiny versions of the folders in the documentation's commands: texts, datasets, runs, a model of transformers."""

import json
import lzma
import random
import re
import shutil
from pathlib import Path

from residua.data import open_corpus, prepare
from residua.reproduce.entry import load
from tests.convert.tiny import saved
from tests.docs.commands import ROOT, Command, blocks
from tests.evaluate.test_eval_scores import write_task
from tests.reproduce.conftest import QUICK
from tests.trained import WORDS, train_run

SIZES = ["model.layers=8", "model.width=32", "model.ffn.hidden=256"]
RECIPE = [
    "train.steps=4", "train.micro_batch=2", "train.accumulate=1", "train.schedule.warmup=1", "train.log_every=1",
    "train.validate_every=2", "train.save_every=2", "train.device=cpu", "train.compile=off", "data.sequence=32",
    "data.validation_tokens=128",
]  # fmt: skip
TEXTS = ("my-texts", "corpus")
STUDIES = "docs/results/studies/"
MORE = """name = "wiki"
base = "mini"
data = "data/wiki"
seeds = 3
baseline = "prenorm"
ladder = [0.5, 1, 1.5, 2]
tune = { lr = [0.5, 1, 2], share = 0.25, seed = 1000 }

[variants]
prenorm = ["prenorm"]
highway = ["highway"]
"""


def sources(folder: Path) -> None:
    """The user's files before the first command: texts, prompts, tasks, files that the page shows."""
    drawn = random.Random(0)
    documents = [" ".join(drawn.choices(WORDS, k=60)) + ".\n\n" for _ in range(120)]
    for name in TEXTS:
        (folder / name).mkdir(parents=True)
        for number, text in enumerate(documents):
            (folder / name / f"{number}.txt").write_text(text)
    for name, order in (("book.txt", 1), ("other.txt", -1)):  # backwards, since text in both would be refused
        (folder / name).write_text("<|endoftext|>".join(text[::order] for text in documents))
    for name, order in (("train", 1), ("val", -1), ("corpus/part", 1)):
        lines = "".join(json.dumps({"text": text[::order]}) + "\n" for text in documents)
        with lzma.open(folder / f"{name}.jsonl.xz", "wt") as file:
            file.write(lines)
    (folder / "prompts.txt").write_text("depth is\nthe layers of\n")
    (folder / "tasks").mkdir()
    for task in ("arc_easy", "arc_challenge", "hellaswag", "openbookqa", "piqa", "winogrande"):
        write_task(folder / "tasks", task, questions=6)
    (study, *_) = (text for _, language, text in blocks(ROOT / "docs" / "compare.md") if language == "toml")
    (folder / "wiki.toml").write_text(study)
    (folder / "more.toml").write_text(MORE)
    (plugin, *_) = (text for _, language, text in blocks(ROOT / "docs" / "extend.md") if language == "python")
    (folder / "channel_gain.py").write_text(plugin)


class World:
    """Makes each kind of folder once, and hands out copies."""

    def __init__(self, place: Path) -> None:
        self.place = place
        sources(place)
        prepare(open_corpus([place / "corpus"], holdout=0.2), place / "data", "bytes", workers=1)
        (place / "trained").mkdir()
        self.run = train_run(place / "trained")
        (place / "qwen-shaped").mkdir()
        wide = {"width": 128, "ffn": {"kind": "swiglu", "hidden": 128}}  # FP8 for an engine has blocks of 128
        self.shaped = train_run(place / "qwen-shaped", **wide, head={"kind": "untied"})
        self.model = place / "model"
        saved(self.model, "Qwen3", head_dim=16, vocab_size=320, num_hidden_layers=4)
        shutil.copy(self.run / "tokenizer.json", self.model)

    def supply(self, folder: Path, command: Command) -> None:
        """Put the inputs of the command into the folder, unless an earlier command made it."""
        words = command.words
        for before, word in zip(("", *words), words, strict=False):
            path = folder / word
            if path.exists() or (before in ("--out", "--engine") and "--resume" not in words):
                continue
            if word.startswith("data/") or before == "--data":
                shutil.copytree(self.place / "data", path)
            elif word.startswith("models/"):
                shutil.copytree(self.model, path)
            elif word.startswith("runs/qwen3"):
                self._imported(path.parent / Path(word).name if word.count("/") == 1 else folder / "runs" / "qwen3")
            elif word.startswith("runs/plain"):
                shutil.copytree(self.shaped, path)
            elif word.startswith("runs/"):
                shutil.copytree(self.run, path)
            elif word.startswith(STUDIES):
                _studies(folder / STUDIES)

    def _imported(self, run: Path) -> None:
        from residua.storage.hugging_face import import_folder

        if not run.exists():
            import_folder(self.model, run)


def _studies(place: Path) -> None:
    """The repository's studies; those over sizes train on a few hundred tokens."""
    place.mkdir(parents=True, exist_ok=True)
    for file in (ROOT / STUDIES).glob("*.toml"):
        small = re.sub(r"(?<=^tokens_per_parameter = ).*", "0.003", file.read_text("utf-8"), flags=re.M)
        (place / file.name).write_text(small, "utf-8")


def shrunk(command: Command, verb: str, parameters: dict) -> list[str]:
    """The command's arguments, and at their end settings that make it small; a number of layers that it names stays."""
    own = command.arguments or []
    layered = any(word.startswith("model.layers=") for word in own)
    return [*own, *(word for word in _smaller(verb, parameters) if not (layered and word == SIZES[0]))]


def _smaller(verb: str, parameters: dict) -> list[str]:
    if verb == "train":
        if parameters["resume"]:
            return []
        return [*RECIPE, *_sizes(parameters["start"], parameters["source"])]
    if verb == "compare":
        if parameters["listing"] or (parameters["what"] or [""])[0].endswith(".json"):
            return []
        own_sizes = any(word.startswith(STUDIES) for word in parameters["what"] or [])
        sizes = [] if own_sizes else _sizes(parameters["start"], parameters["base"])
        small = [word for setting in [*RECIPE, *sizes] for word in ("--set", setting)]
        length = ["--tokens-per-parameter", "0.01"] if parameters["sizes"] else []
        return [*small, *length, "--seeds", "1", "--workers", "1", "--threads", "1", "--calibration", "4"]
    if verb == "reproduce":
        return _entry(parameters)
    preset = parameters.get("preset")
    return {
        "diagnose": ["--tokens", "128", "--length", "32", "--ablation-tokens", "64"],
        "eval": ["--tokens", "64", "--limit", "2", "--shots", "1"],
        "generate": ["--tokens", "4"],
        "quantize": ["--calibration", "4", "--tokens", "64", "--probes", "1"],
        "bench ops": ["--tokens", "8", "--width", "16", "--repeats", "1", "--vocabulary", "64", "--sublayers", "4",
                      "--implementations", "reference"],
        "bench curve": ["--steps", "2", *RECIPE, *_sizes(None, preset), "model.vocab_size=1024"],
        "bench step": ["--steps", "1", "--warmup", "0", "--no-compile", "--micro-batch", "1", "--accumulate", "1",
                       "--sequence", "16", *_sizes(None, preset), "model.vocab_size=320"],
    }.get(verb, [])  # fmt: skip


def _entry(parameters: dict) -> list[str]:
    """One size and one row of an entry that trains, narrow and short."""
    if parameters["entry"] is None or any(parameters[key] for key in ("plan", "study", "run")):
        return []
    entry = load(parameters["entry"])
    changes = [word for change in QUICK for word in ("--set", change)]
    few = ["--sizes", entry.sizes[0].name, "--rows", entry.rows[1].name, "--seeds", "1", "--limit", "2"]
    scale = [] if parameters["demo"] else ["--scale", "1/1000000"]
    return [*scale, *few, *changes, "--threads", "1"]


def _sizes(start: Path | None, base: str | None) -> list[str]:
    """A run's weights have their shapes; hybrids and experts are small in the presets of a CPU."""
    if start is not None or any(kind in (base or "") for kind in ("hybrid", "moe")):
        return []
    if "kimi" in (base or ""):
        return ["model.width=32", "model.context=32", "model.ffn.hidden=16"]
    return [*SIZES, "model.attention.heads=2", "model.context=32"]
