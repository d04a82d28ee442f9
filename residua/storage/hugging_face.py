"""Hugging Face folders: those written by `residua export`, and those of transformers' own models.

Both are opened as models, or imported as runs, one tensor at a time. No code from a folder is run, and no pickle is
read: weights are safetensors. The other files of a folder (chat template, tokenizer and generation settings) are its
companions. An imported run stores them in `source/`, and so does every run that starts from its weights. Exports
include them again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from residua.config.model import ModelConfig
from residua.config.run import RunConfig
from residua.config.settings import ConfigError
from residua.convert.families import find_family
from residua.convert.family import Family, Names, is_known
from residua.convert.layouts import Rule
from residua.data.tokenizer import SOURCE, Tokenizer
from residua.errors import UserError
from residua.files import atomic_folder, refuse_used, write_atomically
from residua.model.decoder import Decoder
from residua.model.size import build_if_it_fits, measure, require_room, shapes
from residua.reading import OpenShape, check, inside, read_json, read_text, shown
from residua.storage.checkpoint import FOLDER, model_tensors
from residua.storage.tensors import DTYPES, Entry, fitting, open_tensors, read_tensors, weight_files, write_tensors

AGAIN = "download or save the model again, as safetensors"
EXPORTED_AGAIN = "export or download the folder again"
CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER_CONFIG, SPECIAL_TOKENS = "tokenizer_config.json", "special_tokens_map.json"
CARD_FILE = "README.md"
COMPANIONS = (
    CONFIG, GENERATION, TOKENIZER_CONFIG, SPECIAL_TOKENS, "added_tokens.json", "chat_template.jinja", CARD_FILE
)  # fmt: skip
END_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
HEAD = "lm_head.weight"
IGNORED = ("rotary_emb.inv_freq",)
"""Name suffixes of tensors that old versions of transformers wrote and that can be computed from config.json."""
COMPARED = 2**24
"""Values of each of two tensors that are in memory at once while the two are compared."""


def companions(folder: Path) -> dict[str, Path]:
    """The companion files of a model folder by name: for a run, those in `source/`."""
    place = f"{SOURCE}/" if inside(folder, "config.toml").exists() or inside(folder, SOURCE).is_dir() else ""
    files = {name: inside(folder, place + name) for name in COMPANIONS}
    return {name: path for name, path in files.items() if path.is_file()}


def keep_companions(start: Path, folder: Path) -> None:
    """Copy a model's companions to the `source/` of a run or dump folder, so that its exports have them too."""
    for name, path in companions(start).items():
        target = folder / SOURCE / name
        target.parent.mkdir(exist_ok=True)
        if not target.exists():
            write_atomically(target, read_text(path, "import the model again"))


def read_companion(files: Mapping[str, Path], name: str) -> dict[str, Any]:
    """The content of one companion file; empty if it does not exist."""
    hint = "import or download the model again"
    return read_json(files[name], dict[str, Any], hint, lenient=True) if name in files else {}


def end_ids(files: Mapping[str, Path]) -> dict[str, Any]:
    """The BOS, EOS and padding ids in the form that config.json uses; there may be several EOS ids."""
    keys = read_companion(files, CONFIG)
    return {name: keys[name] for name in END_TOKENS if keys.get(name) is not None}


def stop_ids(folder: Path) -> frozenset[int]:
    """The ids that end a text according to a folder's generation settings; a chat model may have several."""
    ids = read_companion(companions(folder), GENERATION).get("eos_token_id")
    return frozenset(number for number in (ids if isinstance(ids, list) else [ids]) if type(number) is int)


def _model_type(folder: Path) -> object:
    """The `model_type` of config.json; None for a run, and for a folder without the file."""
    if not (folder / "config.json").is_file() or (folder / "config.toml").exists():
        return None
    keys = read_json(inside(folder, "config.json"), dict[str, Any], EXPORTED_AGAIN, lenient=True)
    return keys.get("model_type")


def is_export(folder: Path) -> bool:
    """Whether `residua export` wrote this folder."""
    return _model_type(folder) == "residua"


def is_family(folder: Path) -> bool:
    """Whether a folder's `model_type` names a transformers model that can be imported."""
    return is_known(_model_type(folder))


def exported_name(name: str) -> str:
    """A tensor's name in the folder: the head belongs to transformers' class, everything else to the decoder."""
    return HEAD if name == "unembed.weight" else f"model.decoder.{name}"


class _Keys(OpenShape):
    residua: dict[str, Any]


class _Whole(Rule):
    """Their tensor equals our parameter and may have any shape."""

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield self.theirs[0], self.shape


class Export(Family):
    """The folders of `residua export`, read like those of a family, but with Residua's own tables and tensors."""

    model_type = "residua"
    architecture = "ResiduaForCausalLM"
    KEYS: ClassVar[type[OpenShape]] = _Keys
    TOP: ClassVar[Names] = {name: (exported_name(name),) for name in ("embed.weight", "unembed.weight")}

    def read(self, keys: Mapping[str, Any]) -> ModelConfig:
        config = ModelConfig(**keys["residua"])
        if config.head.kind == "tied" and keys.get("tie_word_embeddings") is False:  # untied after the export
            return ModelConfig(**keys["residua"] | {"head": {"kind": "untied"}})
        return config

    def rules(self, config: ModelConfig, keys: Mapping[str, Any]) -> Iterator[Rule]:
        for name, tensor in model_tensors(shapes(config)).items():
            yield _Whole(name, tuple(tensor.shape), (exported_name(name),), (1,))


def load_folder(folder: Path) -> Decoder:
    """The model of an exported folder, on the CPU."""
    path = folder / "config.json"
    content = read_json(inside(folder, "config.json"), dict[str, Any], EXPORTED_AGAIN)
    if not isinstance(content.get("residua"), dict):
        raise UserError(
            f"{path} describes a model of type {shown(content.get('model_type'))}: `residua export` did not "
            "write it, and `residua import` does not support this family (docs/reference/families.md)."
        )
    try:
        config = Export().read(content)
        saved: dict[str, Tensor] = {}
        for file in weight_files(folder, EXPORTED_AGAIN):
            saved |= read_tensors(file, EXPORTED_AGAIN)
        embed, head = saved.get(exported_name("embed.weight")), saved.get(HEAD)
        if embed is not None and head is not None and not torch.equal(embed.float(), head.float()):
            config = Export().read(content | {"tie_word_embeddings": False})  # as `residua import` reads it
        model = build_if_it_fits(config, folder)
    except ConfigError as error:
        raise UserError(f"{path} holds an invalid configuration: {error}") from None
    hint = f"its config.json was changed, {EXPORTED_AGAIN}"
    for name, tensor in model_tensors(model).items():
        theirs = exported_name(name)
        with torch.no_grad():
            tensor.copy_(fitting(folder, theirs, saved.pop(theirs, None), tensor, hint))
    if surplus := sorted(saved.keys() - {HEAD}):
        raise UserError(f"{folder} holds tensor {surplus[0]!r}, which the model of its config.json does not have.")
    return model


class Imported(NamedTuple):
    """What was imported."""

    model_type: str
    parameters: int
    bytes: int
    has_tokenizer: bool


class _Stored(NamedTuple):
    """A tensor of a folder: its file, its name there, dtype and shape."""

    file: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


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
        stored = {name: tensor for file in weight_files(folder, AGAIN) for name, tensor in self._stored(file)}
        # a model saved without its head (`LlamaModel`) lacks the prefix; if embeddings are tied, it needs no head
        body = self.family.BODY
        prefix = "" if any(name.startswith(body) for name in stored) else body
        self._tensors = {prefix + name: tensor for name, tensor in stored.items()}
        if self.config.head.kind == "tied" and self._has_own_head():
            self._read(keys | {"tie_word_embeddings": False})  # as transformers does
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

    def _stored(self, file: Path) -> Iterator[tuple[str, _Stored]]:
        with open_tensors(file, AGAIN) as content:
            parts = {name: content.get_slice(name) for name in content.keys()}  # noqa: SIM118  # not a mapping
            about = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()}
        for name, (kind, shape) in about.items():
            if kind not in DTYPES:
                raise UserError(f"{file} holds {name!r} as {kind}: import the model in 16 or 32 bits instead.")
            yield self.family.named(name), _Stored(file, name, DTYPES[kind], shape)

    def _has_own_head(self) -> bool:
        """Whether the files hold a head that differs from the embedding; compares a few rows at a time."""
        (embed,), (head,) = (self.family.TOP[name] for name in ("embed.weight", "unembed.weight"))
        if head not in self._tensors or embed not in self._tensors:
            return False
        pair = self._tensors[embed], self._tensors[head]
        if pair[0].shape != (self.config.vocab_size, self.config.width):  # `_check` refuses it
            return False
        if pair[0].shape != pair[1].shape:
            return True
        with open_tensors(pair[0].file, AGAIN) as first, open_tensors(pair[1].file, AGAIN) as second:
            tables = first.get_slice(pair[0].name), second.get_slice(pair[1].name)
            rows = max(1, COMPARED // self.config.width)
            parts = ([table[n : n + rows].float() for table in tables] for n in range(0, self.config.vocab_size, rows))
            return any(not torch.equal(*pair) for pair in parts)

    def _check(self) -> None:
        """Refuse tensors that are missing, have the wrong shape, or do not belong to the family."""
        left = set(self._tensors)
        for rule in self.rules:
            for name, expected in rule.shapes():
                if name not in self._tensors:
                    raise UserError(f"{self.folder} lacks tensor {name!r}, which its config.json asks for: {AGAIN}.")
                shape = self._tensors[name].shape
                if shape != expected:
                    raise UserError(
                        f"{self.folder} holds {name!r} with shape {list(shape)}, but its config.json asks for "
                        f"{list(expected)}: {AGAIN}."
                    )
                left.discard(name)
        if self.config.head.kind == "tied":
            left -= set(self.family.TOP["unembed.weight"])
        left -= {name for name in left if name.endswith(IGNORED) or self.family.is_left_out(name, self.config)}
        surplus = sorted(left)
        if surplus:
            raise UserError(
                f"{self.folder} cannot be imported: it holds tensor {surplus[0]!r}, which {self.family.model_type} "
                "models do not have in Residua."
            )

    def dtype(self, rule: Rule) -> torch.dtype:
        """The dtype of a parameter: that of its parts, or float32 if values change or the parts differ."""
        dtypes = {self._tensors[name].dtype for name in rule.theirs}
        return dtypes.pop() if rule.exact and len(dtypes) == 1 else torch.float32

    def parameter(self, rule: Rule) -> Tensor:
        """One parameter of ours."""
        tensors = []
        for stored in (self._tensors[name] for name in (*rule.theirs, *rule.also)):
            with open_tensors(stored.file, AGAIN) as content:
                tensors.append(content.get_tensor(stored.name))
        return rule.read(tensors)


def load_family(folder: Path) -> Decoder:
    """The model of a folder of a known family, on the CPU in float32."""
    source = Source(folder)
    model = shapes(source.config)
    require_room(model, folder)
    for rule in source.rules:
        parent, _, name = rule.ours.rpartition(".")
        module, value = model.get_submodule(parent), source.parameter(rule).to(torch.float32, copy=True)
        if name in module._buffers:
            module.register_buffer(name, value)
        else:
            module.register_parameter(name, nn.Parameter(value))
    return model


def import_folder(folder: Path, out: Path) -> Imported:
    """Write a run folder with one checkpoint at step 0, in the precision of the folder's weights."""
    refuse_used(out)
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: name a Hugging Face model folder with safetensors.")
    if (folder / "config.toml").exists():
        raise UserError(f"{folder} is already a run: use it directly.")
    source = Source(folder)
    entries = [Entry(rule.ours, source.dtype(rule), rule.shape) for rule in source.rules]
    has_tokenizer = inside(folder, "tokenizer.json").is_file()
    if has_tokenizer:
        Tokenizer.load(folder).require_model(source.config.vocab_size, folder)
    with atomic_folder(out) as run:
        (run / "config.toml").write_text(RunConfig(model=source.config).to_toml(), encoding="utf-8")
        step = run / FOLDER / "step-0"
        step.mkdir(parents=True)
        write_tensors(step / "model.safetensors", entries, map(source.parameter, source.rules), folder)
        state = {"step": 0, "validation_loss": None, "imported": source.family.model_type}
        (step / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
        (run / SOURCE).mkdir()
        for name in COMPANIONS:
            if inside(folder, name).is_file():
                shutil.copyfile(folder / name, run / SOURCE / name)
        card = run / SOURCE / CARD_FILE
        if card.is_file():  # text in any encoding
            card.write_text(card.read_bytes().decode(errors="replace"), encoding="utf-8")
        if has_tokenizer:
            shutil.copyfile(folder / "tokenizer.json", run / "tokenizer.json")
    total = sum(entry.bytes for entry in entries)
    return Imported(source.family.model_type, measure(source.config).parameters, total, has_tokenizer)
