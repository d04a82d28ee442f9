"""Folders of transformers' own models: opened as models, or imported as runs, one tensor at a time. Folders of
`residua export` are imported in the same way.

No code from a folder is run, and no pickle is read: weights are safetensors.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from residua.config.model import ModelConfig
from residua.config.run import RunConfig
from residua.config.settings import ConfigError
from residua.convert.families import find_family
from residua.convert.family import Family, Rule, is_known
from residua.data.tokenizer import SOURCE, Tokenizer
from residua.errors import UserError
from residua.files import atomic_folder, refuse_used
from residua.model.decoder import Decoder
from residua.model.size import measure, require_room, shapes
from residua.reading import check, inside, read_json
from residua.storage.checkpoint import FOLDER
from residua.storage.exported import AGAIN as EXPORTED_AGAIN
from residua.storage.exported import Export, is_export
from residua.storage.stream import Entry, write_tensors
from residua.storage.tensors import DTYPES, open_tensors, weight_files

AGAIN = "download or save the model again, as safetensors"
KEPT = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
BODY = "model."
"""Begins the names of all tensors but the head's."""
IGNORED = ("rotary_emb.inv_freq",)
"""Ends of the names of tensors that old versions of transformers wrote and that follow from config.json."""
COMPARED = 2**24
"""Values of two tensors that are in memory at once where they are compared."""


class Imported(NamedTuple):
    """What was imported."""

    model_type: str
    parameters: int
    bytes: int
    has_tokenizer: bool


class Source:
    """A folder of a known family or of `residua export`: its configuration, and its tensors, read one by one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = inside(folder, "config.json")
        keys = read_json(path, dict[str, Any], AGAIN, lenient=True)
        try:
            self.family: Family = Export() if is_export(folder) else find_family(keys.get("model_type"))
        except UserError as error:
            raise UserError(f"{folder} cannot be imported: {error}") from None
        keys = self.family.spelled(keys)
        check(keys, self.family.KEYS, path, AGAIN)
        self._read(keys)
        self._files: dict[str, Path] = {}
        self._stored: dict[str, str] = {}
        self._about: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for file in weight_files(folder, AGAIN):
            self._look(file)
        if not any(name.startswith(BODY) for name in self._files):
            self._add_prefix()
        if self.config.head.kind == "tied" and self._has_own_head():
            self._read(keys | {"tie_word_embeddings": False})  # transformers does not tie them either
        self._check()

    def _read(self, keys: dict[str, Any]) -> None:
        try:
            self.config: ModelConfig = self.family.read(keys)
            self.rules = list(self.family.rules(self.config, keys))
        except ConfigError as error:
            raise UserError(
                f"{self.folder} cannot be imported, because its config.json is not valid: {error}"
            ) from None
        except UserError as error:
            raise UserError(f"{self.folder} cannot be imported: {error}") from None

    def _look(self, file: Path) -> None:
        with open_tensors(file, AGAIN) as content:
            parts = {name: content.get_slice(name) for name in content.keys()}  # noqa: SIM118  # it is no mapping
            about = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()}
        for stored, (kind, shape) in about.items():
            if kind not in DTYPES:
                raise UserError(f"{file} holds {stored!r} as {kind}: import the model in 16 or 32 bits instead.")
            name = self.family.named(stored)
            self._files[name], self._stored[name] = file, stored
            self._about[name] = DTYPES[kind], shape

    def _add_prefix(self) -> None:
        """A model that was saved without its head (`LlamaModel`) lacks the prefix, and needs no head if it is tied."""
        self._files = {BODY + name: file for name, file in self._files.items()}
        self._stored = {BODY + name: stored for name, stored in self._stored.items()}
        self._about = {BODY + name: about for name, about in self._about.items()}

    def _has_own_head(self) -> bool:
        """Whether the files hold a head that is not the embedding, compared some rows at a time."""
        (embed,), (head,) = (self.family.TOP[name] for name in ("embed.weight", "unembed.weight"))
        if head not in self._files or embed not in self._files:
            return False
        shape = self._about[embed][1]
        if shape != (self.config.vocab_size, self.config.width):  # `_check` refuses it
            return False
        if self._about[head][1] != shape:
            return True
        with open_tensors(self._files[embed], AGAIN) as first, open_tensors(self._files[head], AGAIN) as second:
            tables = first.get_slice(self._stored[embed]), second.get_slice(self._stored[head])
            rows = max(1, COMPARED // shape[1])
            parts = ([table[n : n + rows].float() for table in tables] for n in range(0, shape[0], rows))
            return any(not torch.equal(*pair) for pair in parts)

    def _check(self) -> None:
        """Refuse tensors that are missing, have another shape, or are not the family's."""
        left = set(self._files)
        for rule in self.rules:
            for name, asked in rule.shapes():
                if name not in self._files:
                    raise UserError(f"{self.folder} lacks tensor {name!r}, which its config.json asks for: {AGAIN}.")
                shape = self._about[name][1]
                if shape != asked:
                    raise UserError(
                        f"{self.folder} holds {name!r} with shape {list(shape)}, but its config.json asks for "
                        f"{list(asked)}: {AGAIN}."
                    )
                left.discard(name)
        if self.config.head.kind == "tied":
            left -= set(self.family.TOP["unembed.weight"])
        surplus = sorted(name for name in left if not name.endswith(IGNORED))
        if surplus:
            raise UserError(
                f"{self.folder} cannot be imported: it holds tensor {surplus[0]!r}, which {self.family.model_type} "
                "models do not have here."
            )

    def dtype(self, rule: Rule) -> torch.dtype:
        """The precision of a parameter: that of its parts, float32 if values are changed or parts differ."""
        found = {self._about[name][0] for name in rule.theirs}
        return found.pop() if rule.exact and len(found) == 1 else torch.float32

    def parameter(self, rule: Rule) -> Tensor:
        """One parameter of ours."""
        return rule.read([self._tensor(name) for name in rule.theirs])

    def _tensor(self, name: str) -> Tensor:
        with open_tensors(self._files[name], AGAIN) as content:
            tensor: Tensor = content.get_tensor(self._stored[name])
            return tensor


def is_family(folder: Path) -> bool:
    """Whether a folder holds a model of transformers that can be imported, by its `model_type`."""
    if not (folder / "config.json").is_file() or (folder / "config.toml").exists():
        return False
    keys = read_json(inside(folder, "config.json"), dict[str, Any], EXPORTED_AGAIN, lenient=True)
    return is_known(keys.get("model_type"))


def load_family(folder: Path) -> Decoder:
    """The model of such a folder, on the CPU in float32."""
    source = Source(folder)
    model = shapes(source.config)
    require_room(model, folder)
    for rule in source.rules:
        parent, _, own = rule.ours.rpartition(".")
        module, value = model.get_submodule(parent), source.parameter(rule).to(torch.float32, copy=True)
        if own in module._buffers:
            module.register_buffer(own, value)
        else:
            module.register_parameter(own, nn.Parameter(value))
    return model


def import_folder(folder: Path, out: Path) -> Imported:
    """Write a run folder with one checkpoint, of step 0, in the precision of the folder's weights."""
    refuse_used(out)
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: name one with a model of transformers, saved as safetensors.")
    if (folder / "config.toml").exists():
        raise UserError(f"{folder} is a run already: use it as it is.")
    source = Source(folder)
    entries = [Entry(rule.ours, source.dtype(rule), rule.shape) for rule in source.rules]
    has_tokenizer = inside(folder, "tokenizer.json").is_file()
    if has_tokenizer:
        Tokenizer.load(folder).require_model(source.config.vocab_size, folder)
    with atomic_folder(out) as run:
        (run / "config.toml").write_text(RunConfig(model=source.config).to_toml(), encoding="utf-8")
        step = run / FOLDER / "step-0"
        step.mkdir(parents=True)
        write_tensors(step / "model.safetensors", entries, _parameters(source), folder)
        state = {"step": 0, "validation_loss": None, "imported": source.family.model_type}
        (step / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
        (run / SOURCE).mkdir()
        for name in KEPT:
            if inside(folder, name).is_file():
                shutil.copyfile(folder / name, run / SOURCE / name)
        if has_tokenizer:
            shutil.copyfile(folder / "tokenizer.json", run / "tokenizer.json")
    total = sum(entry.bytes for entry in entries)
    return Imported(source.family.model_type, measure(source.config).parameters, total, has_tokenizer)


def _parameters(source: Source) -> Iterator[Tensor]:
    for rule in source.rules:
        yield source.parameter(rule)
