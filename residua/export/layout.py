"""Exports in the layout of one of transformers' own families: no code travels, and any tool that knows it reads it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from residua.convert.families import find_family
from residua.convert.family import Rule
from residua.data.tokenizer import Tokenizer
from residua.errors import UserError
from residua.export.card import CARD_FILE, model_card
from residua.export.check import check_layout
from residua.export.folder import end_tokens, json_text, tokenizer_config
from residua.export.precision import FLOAT32, Precision
from residua.files import atomic_folder, refuse_used
from residua.model.decoder import Decoder
from residua.reading import inside
from residua.storage.companions import CONFIG, TOKENIZER_CONFIG, companions, read_companion
from residua.storage.stream import Entry, write_tensors


def write_layout(
    model: Decoder,
    tokenizer: Tokenizer,
    run: Path,
    out: Path,
    layout: str,
    precision: Precision = FLOAT32,
    card: str | None = None,
) -> float | None:
    """Write the model of a run as a folder of the family `layout`; returns what `check_layout` finds.

    What `run` has beside its weights goes along: chat template, generation settings and, if it was of this family, the
    keys of config.json that say nothing about the model's mathematics.
    """
    refuse_used(out)
    family = find_family(layout)
    kept = companions(run)
    before = read_companion(kept, CONFIG)
    if before.get("model_type") != layout:
        before = end_tokens(tokenizer, kept)
    before.pop("torch_dtype", None)
    try:
        keys = family.write(model.config) | {key: before[key] for key in family.FREE if key in before}
        rules = list(family.rules(model.config, keys))
    except UserError as error:
        raise UserError(f"--layout {layout} cannot hold this model: {error}") from None
    with atomic_folder(out) as folder:
        config = {**before, **keys, "dtype": precision.name}
        (folder / "config.json").write_text(json_text(config), encoding="utf-8")
        (folder / CARD_FILE).write_text(card or model_card(model, out.name, own_code=False), encoding="utf-8")
        if TOKENIZER_CONFIG not in kept:
            text = json_text(tokenizer_config(tokenizer, model.config, kept))
            (folder / TOKENIZER_CONFIG).write_text(text, encoding="utf-8")
        for name in kept.keys() - {CONFIG}:
            shutil.copyfile(kept[name], folder / name)
        shutil.copyfile(inside(run, "tokenizer.json"), folder / "tokenizer.json")
        tensors = model.state_dict()
        dtypes = [precision.of_rule(rule, tensors[rule.ours]) for rule in rules]
        entries = [
            Entry(name, dtype, shape)
            for rule, dtype in zip(rules, dtypes, strict=True)
            for name, shape in rule.shapes()
        ]
        write_tensors(folder / "model.safetensors", entries, _theirs(tensors, rules))
        return check_layout(folder, model, precision.rounds)


def _theirs(tensors: Mapping[str, Tensor], rules: list[Rule]) -> Iterator[Tensor]:
    for rule in rules:
        yield from rule.write(tensors[rule.ours]).values()
