"""The README.md of a published folder: the model, how to load it, its training data, its losses, and papers to cite.

Its front matter is for the Hub: license, base model, datasets and languages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field

from residua.config.model import ModelConfig
from residua.config.run import RunConfig
from residua.data.dataset import DESCRIPTION
from residua.data.tokenizer import SOURCE
from residua.errors import UserError
from residua.model.decoder import Decoder
from residua.reading import ReadError, Shape, inside, read_json
from residua.report.plain import markdown
from residua.storage.checkpoint import best, checkpoints
from residua.storage.hugging_face import CARD_FILE, companions
from residua.storage.run import METRICS, read_metrics
from residua.version import __version__

LONGEST_HEAD = 2**16
NAME = r"[A-Za-z0-9][\w.-]*"
FORMS = {
    "license": (r"[a-z0-9][a-z0-9.+-]*", "a license name of the Hub, such as apache-2.0"),
    "base_model": (rf"{NAME}/{NAME}", "a model on the Hub, such as org/name"),
    "datasets": (rf"{NAME}(/{NAME})?", "a dataset on the Hub, such as org/name"),
    "language": (r"[a-z]{2,3}(-[A-Za-z0-9]+)*|multilingual|code", "a language code, such as en"),
}
"""The pattern that each value must match, and its description."""


OPTIONS = {"base_model": "base-model", "datasets": "dataset"}


class Metadata(NamedTuple):
    """The values in a card's front matter; an empty tuple omits its key."""

    license: tuple[str, ...] = ()
    base_model: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    language: tuple[str, ...] = ()

    def check(self) -> Metadata:
        """Refuse values that do not match their pattern, naming the command-line option; returns itself."""
        for key, values in self._asdict().items():
            form, meaning = FORMS[key]
            for value in values:
                if not re.fullmatch(form, value, re.ASCII):
                    raise UserError(f"--{OPTIONS.get(key, key)} {value} is invalid: give {meaning}.")
        return self

    def lines(self) -> str:
        """The front matter as YAML; its values are written as JSON, a subset of YAML."""
        license = [f"license: {json.dumps(name)}" for name in self.license[:1]]
        rest = (
            f"{key}:\n" + "\n".join(f"- {json.dumps(value)}" for value in values)
            for key, values in self._asdict().items()
            if values and key != "license"
        )
        return "".join(f"{part}\n" for part in (*license, *rest))


class _Recipe(Shape):
    sources: list[str] = Field(default_factory=list)


class _Dataset(Shape):
    recipe: _Recipe = _Recipe()
    hub_datasets: list[str] = Field(default_factory=list)


def describe_data(path: str | None) -> _Dataset:
    """The description of a dataset; empty if the dataset no longer exists."""
    if path is None or not (Path(path) / DESCRIPTION).is_file():
        return _Dataset()
    try:
        return read_json(Path(path) / DESCRIPTION, _Dataset, "prepare the data again")
    except ReadError:
        return _Dataset()


def card_metadata(folder: Path, given: Metadata) -> Metadata:
    """The given values; the rest come from the model's own card and from the data its run was trained on."""
    card = companions(folder).get(CARD_FILE)
    original = Metadata() if card is None else read_metadata(card)
    trained: tuple[str, ...] = ()
    if (folder / "config.toml").is_file():
        config = RunConfig.from_toml(inside(folder, "config.toml"))
        trained = tuple(describe_data(config.data.path).hub_datasets)
    known = original._replace(datasets=tuple(dict.fromkeys((*original.datasets, *trained))))
    return Metadata(*(ours or theirs for ours, theirs in zip(given, known, strict=True)))


def read_metadata(card: Path) -> Metadata:
    """The well-formed values of a card; needs PyYAML, a dependency of huggingface_hub."""
    try:
        import yaml
    except ImportError:
        return Metadata()
    text = card.read_bytes()[:LONGEST_HEAD].decode(errors="replace").replace("\r\n", "\n")
    head = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    try:
        content: Any = None if head is None else yaml.safe_load(head[1])
    except (yaml.YAMLError, ValueError, RecursionError):
        return Metadata()
    if not isinstance(content, dict):
        return Metadata()
    return Metadata(*(tuple(_usual(content.get(key), FORMS[key][0])) for key in Metadata._fields))


def _usual(value: Any, form: str) -> Iterator[str]:
    values: Iterable[Any] = value if isinstance(value, list) else (value,)
    for each in values:
        word = "no" if each is False else each  # Norwegian: YAML reads `no` as false
        if isinstance(word, str) and re.fullmatch(form, word, re.ASCII):
            yield word


MAX_ROWS = 12
"""Maximum rows of the loss table, and maximum data sources listed by name."""

ATTNRES = ("Attention Residuals", "2603.15031")
SINKS = ("A Unified View of Attention and Residual Sinks", "2601.22966")
EXOFORMER = ("Attention Projection Mixing with Exogenous Anchors", "2601.08131")
DYT = ("Transformers without Normalization", "2503.10622")
GLU = ("GLU Variants Improve Transformer", "2002.05202")
GATED = ("Gated Attention for Large Language Models", "2505.06708")

PAPERS: dict[tuple[str, str], tuple[tuple[str, str], ...]] = {
    ("topology", "parallel"): (("GPT-NeoX-20B: An Open-Source Autoregressive Language Model", "2204.06745"),),
    ("topology", "clipped"): (SINKS,),
    ("topology", "scaled"): (
        ("Going deeper with Image Transformers", "2103.17239"),
        ("ReZero is All You Need", "2003.04887"),
    ),
    ("topology", "laurel"): (("LAuReL: Learned Augmented Residual Layer", "2411.07501"),),
    ("topology", "lns"): (("The Curse of Depth in Large Language Models", "2502.05795"),),
    ("topology", "keel"): (("Post-LayerNorm Is Back: Stable, ExpressivE, and Deep", "2601.19895"),),
    ("topology", "deepnorm"): (("DeepNet: Scaling Transformers to 1,000 Layers", "2203.00555"),),
    ("topology", "resi_dual"): (("ResiDual: Transformer with Dual Residual Connections", "2304.14802"),),
    **{("topology", kind): () for kind in ("x0", "gated_residual", "layer_factor")},  # public code without a paper
    **{("topology", f"{extent}_attnres"): (ATTNRES,) for extent in ("full", "block", "boundary")},
    ("topology", "delta_attnres"): (("Delta Attention Residuals", "2605.18855"),),
    ("topology", "multi_gate"): (("Multi-Gate Residuals", "2605.23259"),),
    ("topology", "highway"): (("Highway Networks", "1505.00387"),),
    **{("topology", kind): (("Hyper-Connections", "2409.19606"),) for kind in ("hyper", "hyper_single_pass")},
    ("topology", "frac"): (("Frac-Connections: Fractional Extension of Hyper-Connections", "2503.14125"),),
    ("topology", "mhc"): (("mHC: Manifold-Constrained Hyper-Connections", "2512.24880"),),
    ("topology", "mhc_lite"): (("mHC-lite", "2601.05732"),),
    ("topology", "dense"): (("DenseFormer", "2402.02622"),),
    ("topology", "mudd"): (("MUDD", "2502.12170"),),
    ("topology", "injection"): (("Parcae: Scaling Laws For Stable Looped Language Models", "2604.12946"),),
    ("topology", "dca"): (("DeepCrossAttention", "2502.06785"),),
    ("anchors", "resformer"): (("Value Residual Learning", "2410.17897"),),
    ("anchors", "gated_value"): (("Transformers with Selective Access to Early Representations", "2605.03953"),),
    ("anchors", "lime"): (("You Do Not Fully Utilize Transformer's Representation Capacity", "2502.09245"),),
    ("anchors", "depth_attention"): (("Depth-Attention: Cross-Layer Value Mixing for Language Models", "2606.05014"),),
    ("anchors", "cla"): (("Reducing Transformer Key-Value Cache Size with Cross-Layer Attention", "2405.12981"),),
    ("anchors", "kv_source"): (("Value Residual Learning", "2410.17897"),),  # generalizes SVFormer
    ("anchors", "value_embeddings"): (),  # public code without a paper
    **{("anchors", kind): (EXOFORMER,) for kind in ("nuresformer", "exoformer")},
    **{
        ("norm", kind): (("Root Mean Square Layer Normalization", "1910.07467"),)
        for kind in ("rmsnorm", "unit_rmsnorm")
    },
    ("norm", "layernorm"): (("Layer Normalization", "1607.06450"),),
    **{("norm", kind): (SINKS,) for kind in ("preaffine", "gatednorm")},
    ("norm", "dyt"): (DYT,),
    ("norm", "derf"): (("Stronger Normalization-Free Transformers", "2512.10938"),),
    ("norm", "gated_dyt"): (DYT, SINKS),
    **{("ffn", kind): (GLU,) for kind in ("swiglu", "glu", "geglu", "clamped_swiglu")},
    ("ffn", "relu2"): (("Primer: Searching for Efficient Transformers for Language Modeling", "2109.08668"),),
    ("ffn", "moe"): (("Switch Transformers", "2101.03961"),),
    **{("gate", kind): (GATED,) for kind in ("elementwise", "headwise")},
    ("qk_norm", "dyt"): (DYT,),
    ("qk_norm", "rms"): (("Query-Key Normalization for Transformers", "2010.04245"),),
    ("linear", "gated_deltanet"): (("Gated Delta Networks", "2412.06464"),),
    ("linear", "kimi_delta"): (("Kimi Linear: An Expressive, Efficient Attention Architecture", "2510.26692"),),
    ("latent", "mla"): (("DeepSeek-V2", "2405.04434"),),
    ("router", "sigmoid_scores"): (("DeepSeek-V3 Technical Report", "2412.19437"),),
}
"""Titles and arXiv numbers of the papers behind a model's parts, by part and kind."""

CARD = """---
library_name: transformers
pipeline_tag: text-generation
{metadata}tags:
{tags}
---

# {name}

A language model with {parameters:,} parameters, written by `residua {command}`, Residua {version}.{about}

{parts}

## Load it

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({quoted}, trust_remote_code=False)
model = AutoModelForCausalLM.from_pretrained({quoted}{trust})
```

{code}

## Training data

{data}

## Losses

{losses}

## Papers

{papers}
"""
_OWN_CODE = """The first lines of each Python file name its origin. Those from Residua are under the Apache License 2.0,
which is in LICENSE. They run without Residua. The license of the weights is up to their owner."""
_NO_CODE = "transformers runs the model with its own code. The license of the weights is up to their owner."


class Form(NamedTuple):
    """The command that wrote a folder, whose code runs it, and whether transformers needs `trust_remote_code`."""

    command: str
    code: str
    trust: str = ""


OWN_CODE = Form("export", _OWN_CODE, ", trust_remote_code=True")
PLAIN = Form("export", _NO_CODE)
ENGINE = Form("quantize", f"It needs compressed-tensors. {_NO_CODE}")


class Trained(NamedTuple):
    """The run that trained a model, and which of its checkpoints the model is."""

    run: Path
    which: Literal["last", "best"] = "last"


def model_card(
    model: Decoder,
    name: str,
    trained: Trained | None = None,
    *,
    form: Form = OWN_CODE,
    metadata: Metadata | None = None,
    about: str = "",
) -> str:
    """The card of a model called `name`, with details from its run, if it has one.

    The front matter, which the Hub reads, holds `metadata`; the first paragraph ends with `about`.
    """
    parts = dict(_parts(model.config))
    has_run = trained is not None and (trained.run / "config.toml").is_file()
    return CARD.format(
        name=markdown(name, begins=True),
        quoted=json.dumps(name),
        command=form.command,
        version=__version__,
        about=about and f" {about}",
        metadata="" if metadata is None else metadata.lines(),
        parameters=sum(p.numel() for p in model.parameters()),
        tags="\n".join(f"- {json.dumps(tag)}" for tag in ("residua", parts["topology"])),
        parts=_table(("part", "kind"), parts.items()),
        trust=form.trust,
        code=form.code,
        data=_data(trained) if trained and has_run else "Not recorded.",
        losses=_losses(trained.run) if trained and has_run else "Not recorded.",
        papers="\n".join(
            f"- {title}, [arXiv:{number}](https://arxiv.org/abs/{number})" for title, number in papers(model.config)
        ),
    )


def papers(config: ModelConfig) -> list[tuple[str, str]]:
    """Title and arXiv number of every paper that a model uses, each once."""
    return list(dict.fromkeys(paper for choice in _parts(config) for paper in PAPERS.get(choice, ())))


def _parts(config: ModelConfig) -> Iterator[tuple[str, str]]:
    yield "topology", config.topology.kind
    yield "anchors", config.anchors.kind
    yield "norm", config.norm.kind
    yield "attention", config.attention.kind
    if config.softmax is not None:
        yield "gate", config.softmax.gate
        yield "qk_norm", config.softmax.qk_norm
    if config.latent is not None:
        yield "latent", config.latent.kind
    if config.linear is not None:
        yield "linear", config.linear.kind
    yield "ffn", config.ffn.kind
    router = config.ffn.model_dump().get("router")
    if router is not None:
        yield "router", router["kind"]
    yield "head", config.head.kind


def _data(trained: Trained) -> str:
    """The training data of the run. Paths are cut to their last part, because a card may be published."""
    run = trained.run
    config = RunConfig.from_toml(inside(run, "config.toml"))
    before = ""
    if inside(run, SOURCE).is_dir():
        before = "The model was imported: see the card of the original for its training data."
        if config.train.start is None:
            return before
    elif config.train.start is not None:
        before = f"The model started from the weights of another run, {markdown(Path(config.train.start).name)}."
    data, step = config.data, _step(trained)
    where = "Residua's embedded corpus: the Python standard library" if data.path is None else Path(data.path).name
    lines = [f"- data: {markdown(where)}"]
    if sources := [markdown(source) for source in _sources(data.path)]:
        lines.append(f"- sources: {', '.join(sources[:MAX_ROWS])}{' and others' if len(sources) > MAX_ROWS else ''}")
    lines += [
        f"- training tokens: {step * config.tokens_per_step:,}, in {step:,} steps",
        f"- sequence length: {config.sequence:,}",
        f"- vocabulary: {config.model.vocab_size:,} tokens",
    ]
    return (f"{before} It was then trained on:\n\n" if before else "") + "\n".join(lines)


def _step(trained: Trained) -> int:
    saved = checkpoints(trained.run)
    chosen = best(saved) if trained.which == "best" else saved[-1]
    assert chosen is not None  # the model was loaded from it
    return chosen.step


def _sources(path: str | None) -> list[str]:
    """The names of the files or sets that a dataset was prepared from, if the dataset still exists."""
    sources = describe_data(path).recipe.sources
    return [Path(source).name if Path(source).is_absolute() else source for source in sources]


def _losses(run: Path) -> str:
    """The validations of a run. If there are many, an evenly spaced selection that includes the last."""
    records = [record for record in read_metrics(run / METRICS) if record["kind"] == "validation"]
    if not records:
        return "Not recorded."
    stride = -(-len(records) // MAX_ROWS)
    chosen = records[::-1][::stride][::-1]
    rows = ((f"{r['step']:,}", f"{r['loss']:.4f}", f"{r['bits_per_byte']:.4f}") for r in chosen)
    return "On the validation set, in nats per token.\n\n" + _table(("step", "loss", "bits per byte"), rows)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    cells = (head, ("---",) * len(head), *(tuple(map(markdown, row)) for row in rows))
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)
