"""The model card of an export, and its way to the Hugging Face Hub (a stand-in: no test uses the network)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from residua.data import open_corpus
from residua.data.pipeline import hub_datasets
from residua.data.tokenizer import Tokenizer
from residua.model.decoder import build
from residua.storage.card import PAPERS, Metadata, Trained, card_metadata, model_card, papers, read_metadata
from residua.storage.hugging_face import import_folder
from tests.convert.tiny import saved
from tests.model.combinations import TABLES
from tests.model.small import small
from tests.trained import residua, train_run

pytestmark = pytest.mark.slow
hub = pytest.importorskip("huggingface_hub")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return train_run(
        tmp_path_factory.mktemp("card"), topology={"kind": "multi_gate", "streams": 2}, norm={"kind": "gatednorm"}
    )


class Hub:
    """A stand-in for the client of the Hub that records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.uploaded: set[str] = set()
        self.refusal: OSError | None = None

    def create_repo(self, repository: str, **settings: Any) -> str:
        self.calls.append((repository, settings))
        return f"https://hub.example/{repository}"

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.calls.append((repo_id, commit_message))
        self.uploaded = {path.name for path in Path(folder_path).iterdir()}


@pytest.fixture
def client(monkeypatch) -> Hub:
    client = Hub()
    monkeypatch.setattr(hub.HfApi, "create_repo", client.create_repo)
    monkeypatch.setattr(hub.HfApi, "upload_folder", client.upload_folder)
    monkeypatch.setattr(hub, "get_token", lambda: "a token of nobody")
    return client


def test_card_has_data_losses_usage_papers_and_no_local_path(
    run: Path, client: Hub, tmp_path: Path, monkeypatch, capsys
) -> None:
    out = tmp_path / "out"
    assert residua(monkeypatch, "export", run, "--out", out, "--push", "me/tiny") == 0
    printed = capsys.readouterr().out
    assert "Pushed to https://hub.example/me/tiny." in printed and 'from_pretrained("me/tiny", trust' in printed
    assert client.calls == [
        ("me/tiny", {"private": True, "exist_ok": True}),
        ("me/tiny", "Upload by `residua export`"),
    ]
    assert client.uploaded == {path.name for path in out.iterdir()} >= {"README.md", "LICENSE", "model.safetensors"}
    assert (out / "LICENSE").read_bytes() == (Path(__file__).parents[2] / "LICENSE").read_bytes()

    card = (out / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert 'tags:\n- "residua"\n- "multi_gate"\n---' in card
    assert 'AutoModelForCausalLM.from_pretrained("me/tiny", trust_remote_code=True)' in card
    assert "- data: data\n- sources: texts\n- training tokens: 512, in 4 steps" in card
    assert "| step | loss | bits per byte |" in card and "\n| 4 | " in card
    assert "Multi-Gate Residuals, [arXiv:2605.23259]" in card and "arXiv:2601.22966" in card
    assert "2603.15031" not in card and str(run.parent) not in card


def test_a_layout_export_has_no_code_and_may_be_public(client: Hub, tmp_path: Path, monkeypatch) -> None:
    run = train_run(tmp_path, ffn={"kind": "swiglu", "hidden": 32})
    out = tmp_path / "out"
    assert residua(monkeypatch, "export", run, "--out", out, "--layout", "qwen3", "--push", "me/plain", "--public") == 0
    assert client.calls[0] == ("me/plain", {"private": False, "exist_ok": True})
    card = (out / "README.md").read_text()
    assert 'from_pretrained("me/plain")' in card and "its own code" in card and not list(out.glob("*.py"))
    assert not (out / "LICENSE").exists()


@pytest.mark.parametrize(
    ("arguments", "token", "words"),
    [
        (("--push", "me/tiny"), None, "--push me/tiny needs a login at the Hugging Face Hub: run `hf auth login`"),
        (("--push", "tiny"), "one", "--push tiny is not a repository name: write ORG/NAME with"),
        (("--push", "me/ti ny"), "one", "--push me/ti ny is not a repository name: write ORG/NAME with"),
        (("--language", "English"), "one", "--language English is invalid: give a language code"),
        (("--dataset", "../mine"), "one", "--dataset ../mine is invalid: give a dataset on the Hub"),
        (("--public",), "one", "--public needs --push: name the repository"),
    ],
)
def test_impossible_push_is_refused_before_writing(
    arguments: tuple[str, ...], token: str | None, words: str, run: Path, client: Hub, tmp_path, monkeypatch, sentence
) -> None:
    monkeypatch.setattr(hub, "get_token", lambda: token)
    assert words in sentence("export", run, "--out", tmp_path / "out", *arguments)
    assert client.calls == []


def test_failed_push_keeps_the_folder_and_suggests_a_command(
    run: Path, client: Hub, tmp_path: Path, monkeypatch, capsys
) -> None:
    client.refusal = OSError("403 Forbidden\nyou have no right to write here")
    out = tmp_path / "out"
    assert residua(monkeypatch, "export", run, "--out", out, "--push", "me/tiny") == 2
    said = capsys.readouterr().err
    assert "me/tiny was not uploaded (403 Forbidden you have no right to write here)" in said
    assert f"`hf upload me/tiny {out} .`" in said and said.count("\n") == 1
    assert (out / "model.safetensors").is_file()


@pytest.mark.parametrize("imported", [True, False])
def test_card_names_the_starting_model_then_the_data(run: Path, tmp_path: Path, imported: bool) -> None:
    continued = shutil.copytree(run, tmp_path / "continued")
    toml = (continued / "config.toml").read_text()
    (continued / "config.toml").write_text(toml.replace("[train]\n", '[train]\nstart = "/home/me/base"\n'))
    if imported:
        (continued / "source").mkdir()
    card = model_card(build(small(layers=1)), "mine", Trained(continued))
    assert ("The model was imported" if imported else "the weights of another run, base. It was then trained") in card
    assert "- data: data\n- sources: texts\n- training tokens: 512, in 4 steps" in card and "/home/me" not in card


def test_a_model_without_a_run_also_gets_a_card() -> None:
    card = model_card(build(small(layers=1)), "mine <b>")
    assert card.count("Not recorded.") == 2 and "\n# mine &lt;b>\n" in card


@pytest.mark.parametrize("part", ["topology", "anchors", "norm"])
def test_every_part_except_the_baseline_cites_a_paper(part: str) -> None:
    kinds = {table["kind"] for table in TABLES[part].values()} - {"additive", "none"}
    assert kinds and all((part, kind) in PAPERS for kind in kinds)


def test_each_paper_is_cited_once() -> None:
    config = small(norm={"kind": "gatednorm"}, topology={"kind": "clipped", "limit": 1.0})
    assert [number for _, number in papers(config)].count("2601.22966") == 1


ORIGINAL = """---
license: mit
language:
- de
- no
base_model: org/base
datasets: [org/texts, "not a name", 7]
---
# Ours
"""


def test_metadata_is_valid_for_the_hubs_library(tmp_path: Path, monkeypatch) -> None:
    """Options come first, then the card of the original; the Hub's own classes read and check all of it."""
    saved(tmp_path / "hf", "Llama", vocab_size=300, num_hidden_layers=1)
    Tokenizer.bytes().save(tmp_path / "hf" / "tokenizer.json")
    (tmp_path / "hf" / "README.md").write_text(ORIGINAL)
    import_folder(tmp_path / "hf", tmp_path / "run")
    given = ("--license", "apache-2.0", "--base-model", "a/b", "--base-model", "c/d", "--layout", "llama")
    assert residua(monkeypatch, "export", tmp_path / "run", "--out", tmp_path / "out", *given) == 0
    expected = {"license": "apache-2.0", "base_model": ["a/b", "c/d"], "datasets": ["org/texts"]}
    expected |= {"language": ["de", "no"], "library_name": "transformers", "pipeline_tag": "text-generation"}
    card = hub.ModelCard.load(tmp_path / "out" / "README.md")
    found = card.data.to_dict()
    assert found == expected | {"tags": ["residua", "additive"]}
    assert hub.ModelCardData(**found).to_dict() == found == hub.metadata_load(tmp_path / "out" / "README.md")
    for name in (*found["base_model"], *found["datasets"]):
        hub.utils.validate_repo_id(name)
    assert card_metadata(tmp_path / "out", Metadata()) == Metadata(
        ("apache-2.0",), ("a/b", "c/d"), ("org/texts",), ("de", "no")
    )


@pytest.mark.parametrize(
    "head", ["", "---\na: [\n---\n", "---\n- list\n---\n", "---\n" + "[" * 2000 + "\n---\n", "\xff"]
)
def test_original_card_without_metadata_is_ignored(head: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(head, encoding="latin-1")
    assert read_metadata(tmp_path / "README.md") == Metadata()


def test_hub_datasets_are_named_in_the_card(run: Path, tmp_path: Path) -> None:
    """A name of two words may also be a folder here: only what was read from the Hub is named."""
    assert hub_datasets(open_corpus(["org/texts:en"])) == {"hub_datasets": ["org/texts"]}
    assert hub_datasets(open_corpus([Path(__file__)])) == {}
    copied = shutil.copytree(run, tmp_path / "run")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset.json").write_text(json.dumps({"hub_datasets": ["org/texts"]}))
    toml = (copied / "config.toml").read_text()
    path = next(line for line in toml.splitlines() if line.startswith("path = "))
    (copied / "config.toml").write_text(toml.replace(path, f'path = "{tmp_path / "data"}"'))
    assert card_metadata(copied, Metadata()).datasets == ("org/texts",)
