"""An export is written whole or not at all, and read back exactly."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import residua
from residua.data.tokenizer import Tokenizer
from residua.export.folder import Precision, write_folder
from residua.storage.hugging_face import companions, import_folder, is_export
from tests.export.exported import bytes_config, in_transformers, trained_like, write
from tests.model.small import small

pytestmark = pytest.mark.slow

FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "configuration_residua.py",
    "modeling_residua.py",
    "README.md",
    "LICENSE",
}


@pytest.fixture(scope="module")
def model():
    return trained_like(bytes_config(small(layers=1, head={"kind": "untied"}, norm={"kind": "gatednorm", "rank": 2})))


@pytest.fixture(scope="module")
def written(model, tmp_path_factory) -> dict[str, bytes]:
    folder = write(model, tmp_path_factory.mktemp("export") / "model")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def folder(written, tmp_path) -> Path:
    """A copy to do damage to."""
    home = tmp_path / "model"
    home.mkdir()
    for name, content in written.items():
        (home / name).write_bytes(content)
    return home


def change(folder: Path, tensors: dict) -> None:
    path = folder / "model.safetensors"
    saved = load_file(path) | tensors
    save_file({name: t for name, t in saved.items() if t is not None}, path)


def test_the_folder_holds_the_files_hugging_face_expects(written):
    assert set(written) >= FILES
    assert all(name.endswith(".py") for name in set(written) - FILES)
    config = json.loads(written["config.json"])
    assert config["architectures"] == ["ResiduaForCausalLM"] and config["model_type"] == "residua"
    assert config["hidden_size"] == 16
    assert config["num_hidden_layers"] == 1 and config["layer_types"] == ["full_attention"]


def test_residua_reads_an_export_back_exactly(folder, model):
    again = residua.load(folder)
    assert again.config == model.config
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert is_export(folder)


def test_reading_an_export_runs_none_of_its_code(folder):
    for path in folder.glob("*.py"):
        path.write_text("raise SystemExit('this ran')")
    residua.load(folder)


def test_a_folder_in_use_is_refused_and_unchanged(folder, model):
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    with pytest.raises(ValueError, match="exists and is not an empty folder: choose another --out"):
        write(model, folder)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    file = folder.parent / "file"
    file.write_text("mine")
    with pytest.raises(ValueError, match="is a file: choose another --out"):
        write(model, file)
    assert file.read_text() == "mine"


def test_weights_have_the_permissions_of_the_configuration(model, tmp_path):
    write_folder(model, Tokenizer.bytes(), tmp_path / "out", check=False)
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]


def test_a_failure_midway_leaves_nothing(model, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr("residua.export.folder.write_shards", full)
    with pytest.raises(OSError, match="No space"):
        write(model, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        ({"model.decoder.norm.weight": None}, "lacks tensor 'model.decoder.norm.weight'"),
        ({"lm_head.weight": None}, "lacks tensor 'lm_head.weight'"),
        (
            {"model.decoder.norm.weight": torch.ones(15)},
            r"'model.decoder.norm.weight' with shape \[15\] where the model has \[16\]",
        ),
        ({"model.decoder.extra": torch.ones(1)}, "holds tensor 'model.decoder.extra'"),
    ],
    ids=["missing", "missing head", "mis-shaped", "surplus"],
)
def test_mismatched_tensors_are_named_in_one_sentence(folder, damage, sentence):
    change(folder, damage)
    with pytest.raises(ValueError, match=sentence):
        residua.load(folder)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("config.json", "{", "config.json is not valid JSON .*: export or download the folder again"),
        ("config.json", '{"model_type": "bert"}', "model of type 'bert': `residua export` did not write it, and"),
        ("config.json", '{"model_type": "residua", "residua": {"layers": 0}}', "layers = 0 is invalid"),
        ("model.safetensors", "nonsense", "model.safetensors cannot be read"),
    ],
)
def test_invalid_files_are_named_in_one_sentence(folder, name, content, sentence):
    (folder / name).write_text(content)
    with pytest.raises(ValueError, match=sentence) as caught:
        residua.load(folder)
    assert "\n" not in str(caught.value)


def test_half_precision_halves_the_files_and_is_read_back(model, tmp_path):
    write_folder(model, Tokenizer.bytes(), tmp_path / "half", Precision(torch.bfloat16), check=False)
    tensors = load_file(tmp_path / "half" / "model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    again = residua.load(tmp_path / "half")
    assert all(
        torch.equal(a.bfloat16().float(), b) for a, b in zip(model.parameters(), again.parameters(), strict=True)
    )


def test_an_export_merged_with_peft_can_be_imported(model, tmp_path):
    peft = pytest.importorskip("peft")
    low_rank = peft.LoraConfig(r=2, target_modules="all-linear")
    adapted = peft.get_peft_model(in_transformers(write(model, tmp_path / "out")), low_rank)
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    merged = adapted.merge_and_unload().eval()
    merged.save_pretrained(tmp_path / "merged", max_shard_size="20KB")
    assert len(list((tmp_path / "merged").glob("*.safetensors"))) > 1
    import_folder(tmp_path / "merged", tmp_path / "run")
    text = torch.arange(40).view(2, 20)
    with torch.no_grad():
        expected = merged(text).logits
        assert (expected - model(text)).abs().max() > 0.1
        torch.testing.assert_close(residua.load(tmp_path / "run")(text), expected, rtol=0, atol=1e-5)


def test_an_export_can_be_imported_again(model, tmp_path):
    folder, run = tmp_path / "half", tmp_path / "run"
    write_folder(model, Tokenizer.bytes(), folder, Precision(torch.bfloat16), check=False)
    made = import_folder(folder, run)
    assert made.model_type == "residua" and made.has_tokenizer
    stored = load_file(run / "checkpoints" / "step-0" / "model.safetensors")
    assert {t.dtype for t in stored.values()} == {torch.bfloat16}
    assert Tokenizer.load(run).hash == Tokenizer.load(folder).hash
    assert {path.name for path in companions(run).values()} >= {"config.json", "tokenizer_config.json"}
    before, after = residua.load(folder), residua.load(run)
    assert before.config == after.config
    text = torch.arange(40).view(2, 20)
    assert torch.equal(before(text), after(text))


@pytest.mark.parametrize(
    "tables",
    [
        {"attention": {"kind": "gated_deltanet", "key_heads": 1, "value_heads": 2, "head_dim": 8}},
        {"topology": {"kind": "multi_gate"}},
        {"ffn": {"kind": "moe", "hidden": 8, "experts": 4, "top_k": 2, "router": {"kind": "sigmoid_scores"}}},
    ],
    ids=["no softmax attention", "topology with parameters", "buffers"],
)
def test_exports_of_unusual_models_can_be_imported_too(tables, tmp_path):
    model = trained_like(bytes_config(small(**tables)))
    import_folder(write(model, tmp_path / "out"), tmp_path / "run")
    again = residua.load(tmp_path / "run").state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("own", [False, True], ids=["the embedding", "its own"])
def test_a_head_trained_after_the_export_is_kept(own, tmp_path):
    folder = write(trained_like(bytes_config(small(layers=1, head={"kind": "tied"}))), tmp_path / "out")
    head = load_file(folder / "model.safetensors")["model.decoder.embed.weight"] + own
    change(folder, {"lm_head.weight": head})
    import_folder(folder, tmp_path / "run")
    for place in (folder, tmp_path / "run"):
        again = residua.load(place)
        assert again.config.head.kind == ("untied" if own else "tied")
        assert torch.equal(again.embed.weight + own, head if again.unembed is None else again.unembed.weight)


def test_import_refuses_a_mismatched_export(folder, tmp_path):
    change(folder, {"model.decoder.norm.weight": None})
    with pytest.raises(ValueError, match=r"lacks tensor 'model.decoder.norm.weight'"):
        import_folder(folder, tmp_path / "run")
    (folder / "config.json").write_text('{"model_type": "residua", "residua": {"layers": 0}}')
    with pytest.raises(ValueError, match=r"cannot be imported, because its config.json is not valid: .*layers = 0"):
        import_folder(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()
