"""The first lines of a model card, which the Hub reads: license, base model, datasets and languages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from residua.config.run import RunConfig
from residua.data.dataset import DESCRIPTION
from residua.errors import UserError
from residua.reading import ReadError, Shape, inside, read_json
from residua.storage.hugging_face import CARD_FILE, companions

LONGEST_HEAD = 2**16
NAME = r"[A-Za-z0-9][\w.-]*"
FORMS = {
    "license": (r"[a-z0-9][a-z0-9.+-]*", "the Hub's name of a license, such as apache-2.0"),
    "base_model": (rf"{NAME}/{NAME}", "a model of the Hub, such as org/name"),
    "datasets": (rf"{NAME}(/{NAME})?", "a dataset of the Hub, such as org/name"),
    "language": (r"[a-z]{2,3}(-[A-Za-z0-9]+)*|multilingual|code", "the code of a language, such as en"),
}
"""The form of each value, and its description."""


OPTIONS = {"base_model": "base-model", "datasets": "dataset"}


class Metadata(NamedTuple):
    """The values of the first lines of a card; an empty tuple leaves its key out."""

    license: tuple[str, ...] = ()
    base_model: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    language: tuple[str, ...] = ()

    def check(self) -> Metadata:
        """Refuse values of another form, as options of a command; returns itself."""
        for key, values in self._asdict().items():
            form, meaning = FORMS[key]
            for value in values:
                if not re.fullmatch(form, value, re.ASCII):
                    raise UserError(f"--{OPTIONS.get(key, key)} {value} has another form: write {meaning}.")
        return self

    def lines(self) -> str:
        """The lines in YAML, of which JSON is a part."""
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
    """The description of a dataset, empty if it is not there any more."""
    if path is None or not (Path(path) / DESCRIPTION).is_file():
        return _Dataset()
    try:
        return read_json(Path(path) / DESCRIPTION, _Dataset, "prepare the data again")
    except ReadError:
        return _Dataset()


def card_metadata(folder: Path, given: Metadata) -> Metadata:
    """What is given, and for the rest what the model's own card says and its run was trained on."""
    card = companions(folder).get(CARD_FILE)
    original = Metadata() if card is None else read_metadata(card)
    trained: tuple[str, ...] = ()
    if (folder / "config.toml").is_file():
        config = RunConfig.from_toml(inside(folder, "config.toml"))
        trained = tuple(describe_data(config.data.path).hub_datasets)
    known = original._replace(datasets=tuple(dict.fromkeys((*original.datasets, *trained))))
    return Metadata(*(ours or theirs for ours, theirs in zip(given, known, strict=True)))


def read_metadata(card: Path) -> Metadata:
    """The values of a card that have the usual form; needs PyYAML, which huggingface_hub brings along."""
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
        word = "no" if each is False else each  # Norwegian, which YAML takes for an answer
        if isinstance(word, str) and re.fullmatch(form, word, re.ASCII):
            yield word
