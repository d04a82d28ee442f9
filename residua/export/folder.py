"""Write a Hugging Face folder atomically, in one of two layouts.

Residua's own layout includes its code (`residua.storage.hugging_face` reads it back). The layout of a transformers
family has no code, and any tool that knows the family can read it.

config.json  generation_config.json  model.safetensors  tokenizer.json  tokenizer_config.json
README.md  LICENSE  configuration_residua.py  modeling_residua.py  and the modules that it imports (see `bundle`)
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from residua.config.model import ModelConfig, head_dim
from residua.convert.families import find_family
from residua.convert.layouts import Rule
from residua.data.tokenizer import Tokenizer
from residua.errors import UserError
from residua.export.bundle import bundle, license_text, users_modules
from residua.export.check import check_export, check_layout
from residua.files import atomic_folder, refuse_used
from residua.model.decoder import Decoder
from residua.reading import inside
from residua.storage.card import PLAIN, model_card
from residua.storage.checkpoint import model_tensors
from residua.storage.hugging_face import (
    CARD_FILE,
    CONFIG,
    GENERATION,
    SPECIAL_TOKENS,
    TOKENIZER_CONFIG,
    companions,
    end_ids,
    exported_name,
    read_companion,
)
from residua.storage.load import Read, StoredModel, in_memory
from residua.storage.tensors import Entry, write_shards
from residua.version import __version__

AUTO_MAP = {
    "AutoConfig": "configuration_residua.ResiduaConfig",
    "AutoModel": "modeling_residua.ResiduaModel",
    "AutoModelForCausalLM": "modeling_residua.ResiduaForCausalLM",
}


@dataclass(frozen=True)
class Precision:
    """`dtype` applies to config.json and to every weight not in `stored`, whose keys are our weight names."""

    dtype: torch.dtype = torch.float32
    stored: Mapping[str, torch.dtype] = field(default_factory=dict)

    @classmethod
    def as_stored(cls, dtypes: Mapping[str, torch.dtype], tensors: Mapping[str, Tensor]) -> Precision:
        """The weights' dtypes in their folder; float64 becomes float32, the dtype in which models are opened."""
        stored_dtypes = {name: torch.float32 if dtype is torch.float64 else dtype for name, dtype in dtypes.items()}
        values: Counter[torch.dtype] = Counter()
        for name, tensor in tensors.items():
            values[stored_dtypes.get(name, torch.float32)] += tensor.numel()
        ((main, _),) = values.most_common(1)
        return cls(main, stored_dtypes)

    @property
    def name(self) -> str:
        """The name in config.json, such as `bfloat16`."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def rounds(self) -> torch.dtype:
        """The dtype to round weights to; with stored dtypes, they stay in the float32 of an open model."""
        return torch.float32 if self.stored else self.dtype

    def of(self, name: str) -> torch.dtype:
        """The dtype of one of our weights."""
        return self.stored.get(name, self.dtype)

    def of_rule(self, rule: Rule, read: Read) -> torch.dtype:
        """The dtype of the tensors in another layout to which one of our weights is written.

        If their values differ from ours (Gemma stores gains minus one), ours are in float32, whatever theirs were. They
        become `dtype` again if nothing is lost.
        """
        if rule.exact or rule.ours not in self.stored:
            return self.of(rule.ours)
        tensor = read(rule.ours).float()
        parts = [part.to(self.dtype) for part in rule.write(tensor).values()]
        return self.dtype if torch.equal(rule.read(parts), tensor) else torch.float32


FLOAT32 = Precision()
SHARD = 5 * 10**9
"""The maximum bytes of a weights file, unless a single tensor has more."""
ROTARY = ("rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor")
"""Keys of an imported config.json that `rope_parameters` replaces in version 5 of transformers."""


def write_folder(
    model: Decoder | StoredModel,
    tokenizer: Tokenizer,
    out: Path,
    precision: Precision = FLOAT32,
    check: bool = True,
    extras: Mapping[str, Path] | None = None,
    card: str | None = None,
    shard: int = SHARD,
) -> float | None:
    """Write an export; `out` must be new or an empty folder. Returns the result of `check_export`.

    `extras` are the `companions` of the model's folder, which are copied; `shard` is as in `write_shards`.
    """
    refuse_used(out)
    stored = model if isinstance(model, StoredModel) else in_memory(model)
    with atomic_folder(out) as folder:
        _fill(folder, stored, tokenizer, precision, extras or {}, shard)
        (folder / CARD_FILE).write_text(card or model_card(stored.model, out.name), encoding="utf-8")
        return check_export(folder, stored.load(), precision.rounds) if check else None


def _fill(
    folder: Path,
    stored: StoredModel,
    tokenizer: Tokenizer,
    precision: Precision,
    extras: Mapping[str, Path],
    shard: int,
) -> None:
    model, special = stored.model, end_tokens(tokenizer, extras)
    config: dict[str, Any] = {
        "architectures": ["ResiduaForCausalLM"],
        "auto_map": AUTO_MAP,
        "model_type": "residua",
        "dtype": precision.name,
        **_standard_names(model.config),
        **special,
        "residua_version": __version__,
        "residua": model.config.model_dump(mode="json"),
    }
    if users_modules(model):  # an installed Residua may not know these classes
        config["implementation"] = "file"
    texts = {
        "config.json": json_text(config),
        GENERATION: json_text(generation_config(special, extras)),
        "tokenizer_config.json": json_text(tokenizer_config(tokenizer, model.config, extras)),
        "LICENSE": license_text(),
        **bundle(model, __version__),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    for name in extras.keys() - set(texts):
        shutil.copyfile(extras[name], folder / name)
    tokenizer.save(folder / "tokenizer.json")
    weights = model_tensors(model)
    entries = [Entry(exported_name(name), precision.of(name), tensor.shape) for name, tensor in weights.items()]
    write_shards(folder, entries, map(stored.read, weights), shard)


def _standard_names(config: ModelConfig) -> dict[str, Any]:
    """Sizes, heads and cache types, under the names that transformers and related libraries look for."""
    # without softmax attention, the cache counts tokens by keys of width 1 next to the recurrent state
    linear = "linear_attention" if config.softmax_layers else "hybrid"
    softmax = config.softmax
    names = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.ffn.hidden,
        "num_hidden_layers": len(config.executed),  # as many layers have a cache
        "max_position_embeddings": config.context,
        "layer_types": ["full_attention" if n in config.softmax_layers else linear for n in config.executed],
        "tie_word_embeddings": config.head.kind == "tied",
    }
    if config.latent is not None:
        names["num_attention_heads"] = config.latent.heads
    if softmax is not None:
        names["num_attention_heads"] = softmax.heads
        names["num_key_value_heads"] = softmax.kv_heads or softmax.heads
        names["head_dim"] = head_dim(config)
    return names


def end_tokens(tokenizer: Tokenizer, extras: Mapping[str, Path]) -> dict[str, Any]:
    """The ids that transformers needs to end and pad a text: those of the source folder, else the tokenizer's."""
    ids, end = end_ids(extras), tokenizer.end_of_text
    return ids if "eos_token_id" in ids else {"eos_token_id": end, "pad_token_id": end, **ids}


def generation_config(special: Mapping[str, Any], extras: Mapping[str, Path]) -> dict[str, Any]:
    """Build generation_config.json: the source folder's, with the ids in `special` if it names no end-of-text token."""
    if GENERATION not in extras:
        return {"do_sample": False, **special}
    settings = read_companion(extras, GENERATION)
    return settings if settings.get("eos_token_id") is not None else {**settings, **special}


def tokenizer_config(tokenizer: Tokenizer, config: ModelConfig, extras: Mapping[str, Path]) -> dict[str, Any]:
    """Build tokenizer_config.json: the source folder's, with our defaults for keys that it lacks.

    In the folder, the name of a special token inside a text becomes that token, as transformers' users expect.
    Residua's own `Tokenizer` always reads it as text: training documents must not be able to end themselves.
    """
    end = tokenizer.backend.id_to_token(tokenizer.end_of_text)
    defaults = {
        "model_max_length": config.context,
        "eos_token": end,
        "pad_token": end,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
    }
    named = read_companion(extras, SPECIAL_TOKENS)
    settings = {key: value for key, value in defaults.items() if key not in named} | read_companion(
        extras, TOKENIZER_CONFIG
    )
    settings.pop("auto_map", None)  # its code is not exported
    # tokenizer.json is authoritative: other classes of transformers rebuild parts of it
    return {**settings, "tokenizer_class": "PreTrainedTokenizerFast"}


def write_layout(
    model: Decoder | StoredModel,
    tokenizer: Tokenizer,
    run: Path,
    out: Path,
    layout: str,
    precision: Precision = FLOAT32,
    card: str | None = None,
    check: bool = True,
    shard: int = SHARD,
) -> float | None:
    """Write the model of a run as a folder of the family `layout`; return the result of `check_layout`.

    Companion files of `run` are included: chat template, generation settings and, if it came from this family, the keys
    of config.json that do not affect the model's mathematics.
    """
    refuse_used(out)
    stored = model if isinstance(model, StoredModel) else in_memory(model)
    config, family = stored.model.config, find_family(layout)
    extras = companions(run)
    before = read_companion(extras, CONFIG)
    if before.get("model_type") != layout:
        before = end_tokens(tokenizer, extras)
    for key in ("torch_dtype", *ROTARY):
        before.pop(key, None)
    try:
        keys = family.write(config) | {key: before[key] for key in family.FREE if key in before}
        rules = list(_without_copies(family.rules(config, keys), stored.read))
    except UserError as error:
        raise UserError(f"--layout {layout} cannot hold this model: {error}") from None
    with atomic_folder(out) as folder:
        text = json_text({**before, **keys, "dtype": precision.name})
        (folder / "config.json").write_text(text, encoding="utf-8")
        if TOKENIZER_CONFIG not in extras:
            text = json_text(tokenizer_config(tokenizer, config, extras))
            (folder / TOKENIZER_CONFIG).write_text(text, encoding="utf-8")
        for name in extras.keys() - {CONFIG}:
            shutil.copyfile(extras[name], folder / name)
        shutil.copyfile(inside(run, "tokenizer.json"), folder / "tokenizer.json")
        (folder / CARD_FILE).write_text(card or model_card(stored.model, out.name, form=PLAIN), encoding="utf-8")
        dtypes = [precision.of_rule(rule, stored.read) for rule in rules]
        entries = [
            Entry(name, dtype, shape)
            for rule, dtype in zip(rules, dtypes, strict=True)
            for name, shape in rule.shapes()
        ]
        parts = (part for rule in rules for part in rule.write(stored.read(rule.ours)).values())
        write_shards(folder, entries, parts, shard)
        return check_layout(folder, stored.load(), precision.rounds) if check else None


def _without_copies(rules: Iterable[Rule], read: Callable[[str], Tensor]) -> Iterator[Rule]:
    """Yield one rule per tensor that maps to several of ours (the norm of parallel sublayers); ours must be equal."""
    first: dict[tuple[str, ...], Rule] = {}
    for rule in rules:
        twin = first.setdefault(rule.theirs, rule) if rule.theirs else rule
        if twin is rule:
            yield rule
        elif not torch.equal(read(twin.ours), read(rule.ours)):
            raise UserError(
                f"{rule.theirs[0]} is one tensor in that layout, but {twin.ours} and {rule.ours} differ in this model."
            )


def json_text(content: Mapping[str, Any]) -> str:
    """Format readable JSON."""
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
