"""Weights that are NaN or infinite are named and refused, by every verb and for every kind of folder."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import residua as package
from residua.distributed.convert import convert
from residua.storage.tensors import nonfinite
from residua.train.health import TrainingStopped
from residua.train.step import Step
from tests.train.conftest import Lab, after_each_step
from tests.trained import residua, train_run


def spoil(file: Path, name: str | None = None, value: float = math.nan) -> str:
    """Put a value into a tensor of a safetensors file; returns the tensor's name."""
    tensors = load_file(file)
    name = name or min(n for n, t in tensors.items() if t.is_floating_point() and t.element_size() > 1)
    tensors[name].view(-1)[-1] = value
    save_file(tensors, file, metadata={"format": "pt"})
    return name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_one_non_finite_value_is_found_in_every_dtype(dtype: torch.dtype) -> None:
    for size in (1, 7, 64, 1000):
        for place in {0, size // 2, size - 1}:
            for value in (math.nan, math.inf, -math.inf):
                tensor = torch.randn(size)
                tensor[place] = math.nan if dtype is torch.float8_e4m3fn else value
                tensors = {"whole": torch.randn(3).to(dtype), "broken": tensor.to(dtype)}
                assert nonfinite(tensors) == ["broken"]


def test_largest_numbers_integers_and_empty_tensors_are_finite() -> None:
    largest = torch.full((9,), torch.finfo(torch.float64).max, dtype=torch.float64)
    assert nonfinite({"a": largest, "b": torch.arange(3), "c": torch.empty(0), "d": -largest.new_ones(1)}) == []


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_run(tmp_path_factory.mktemp("finite"))


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


VERBS = {
    "generate": ("--prompt", "the depth", "--tokens", "4"),
    "eval": (),
    "export": ("--out", "OUT"),
    "diagnose": ("--out", "OUT", "--tokens", "64", "--ablations", "none"),
    "quantize": ("--out", "OUT", "--probes", "0"),
}


@pytest.mark.slow
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=["NaN", "infinite"])
@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_names_a_non_finite_tensor_and_writes_nothing(
    verb: str, value, run, tmp_path, monkeypatch, capsys
) -> None:
    spoil(run / "checkpoints/step-4/model.safetensors", "norm.weight", value)
    before = sorted(run.rglob("*"))
    arguments = [str(tmp_path / "out") if word == "OUT" else word for word in VERBS[verb]]
    assert residua(monkeypatch, verb, run, *arguments) == 2
    said = capsys.readouterr()
    kind = "NaN" if math.isnan(value) else "infinite"
    assert f"weight norm.weight is not finite (1 of 16 values: 1 {kind})" in said.err
    assert said.err.count("\n") == 1 and not said.out.strip()
    assert sorted(run.rglob("*")) == before and not (tmp_path / "out").exists()


def test_load_refuses_non_finite_weights_unless_allowed(run: Path) -> None:
    path = run / "checkpoints/step-4/model.safetensors"
    spoil(path, "embed.weight")
    spoil(path, "norm.weight")
    with pytest.raises(ValueError, match=r"weight embed\.weight is not finite .*, the first of 2 such tensors of \d+"):
        package.load(run)
    assert package.load(run, allow_nonfinite=True).norm.weight.isnan().any()


def test_the_refusal_names_a_finite_checkpoint(run: Path) -> None:
    shutil.copytree(run / "checkpoints/step-4", run / "checkpoints/step-2")
    spoil(run / "checkpoints/step-4/model.safetensors")
    with pytest.raises(ValueError, match=r"move .*step-4 elsewhere to use .*step-2, which is finite"):
        package.load(run)
    spoil(run / "checkpoints/step-2/optimizer.safetensors")
    with pytest.raises(ValueError, match="no other checkpoint of this run is finite"):
        package.load(run)


@pytest.mark.slow
def test_exported_and_quantized_folders_are_also_checked(run: Path, tmp_path: Path) -> None:
    from residua.export import export
    from residua.quantize import load_quantized, quantize

    export(run, tmp_path / "exported")
    spoil(tmp_path / "exported/model.safetensors", "model.decoder.norm.weight", -math.inf)
    with pytest.raises(ValueError, match=r"exported: weight norm\.weight is not finite \(1 of 16 values: 1 infinite\)"):
        package.load(tmp_path / "exported")
    for scheme in ("fp8", "nvfp4"):
        out = tmp_path / scheme
        quantize(run, out, scheme=scheme, probes=0)
        scales = [name for name in load_file(out / "model.safetensors") if name.endswith("weight_scale")]
        spoil(out / "model.safetensors", scales[0])
        with pytest.raises(ValueError, match=r"weight sublayers\.\S+ is not finite"):
            package.load(out)
        with pytest.raises(ValueError, match=r"weight sublayers\.\S+weight_scale is not finite"):
            load_quantized(out)
        assert package.load(out, allow_nonfinite=True) is not None


@pytest.mark.slow
def test_weights_that_overflow_the_arithmetic_are_refused(run: Path, tmp_path, monkeypatch, capsys) -> None:
    path = run / "checkpoints/step-4/model.safetensors"
    tensors = load_file(path)
    tensors["norm.weight"].fill_(3.4e38)
    save_file(tensors, path)
    for verb in ("generate", "eval", "export", "quantize"):
        arguments = [str(tmp_path / "out") if word == "OUT" else word for word in VERBS[verb]]
        assert residua(monkeypatch, verb, run, *arguments) == 2, verb
        said = capsys.readouterr().err
        assert ("not finite, although" in said or "overflows" in said or "not finite although" in said) and said.count(
            "residua: "
        ) == 1, said
    assert residua(monkeypatch, "export", run, "--out", tmp_path / "out", "--precision", "bfloat16") == 2
    assert "model.decoder.norm.weight is not finite" in capsys.readouterr().err
    assert not (tmp_path / "out").exists() and not list(run.glob("evaluations/*"))


@pytest.fixture
def stopped(lab: Lab) -> Path:
    """A run that has saved steps 2, 4 and 6."""
    lab.train("train.keep=5")
    return lab / "run"


def test_a_missing_run_to_convert_is_named(tmp_path: Path) -> None:
    from residua.integrations.torchtitan.convert import convert as to_or_from_titan

    for convert_run in (convert, to_or_from_titan):
        with pytest.raises(ValueError, match="nope is not a folder: name a "):
            convert_run(tmp_path / "nope", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("file", ["model", "optimizer"])
def test_resume_starts_from_the_newest_finite_checkpoint(lab: Lab, stopped: Path, file: str) -> None:
    for step in (4, 6):
        name = spoil(stopped / f"checkpoints/step-{step}/{file}.safetensors")
    lab.resume("train.steps=8", "train.keep=5")
    assert "resuming after step 2 of 8" in lab.printed
    for step in (4, 6):
        assert f"step-{step}: {name} is not finite; it is now step-{step}-not-finite-1" in lab.printed
        assert (stopped / f"checkpoints/step-{step}-not-finite-1/model.safetensors").exists()
    assert lab.saved() == [2, 4, 6, 8]
    assert package.load(stopped) is not None


@pytest.mark.slow
def test_run_without_a_finite_checkpoint_is_not_resumed(lab: Lab, stopped: Path) -> None:
    """The run also stays unchanged."""
    for step in (2, 4, 6):
        spoil(stopped / f"checkpoints/step-{step}/model.safetensors", "norm.weight")
    before = sorted(stopped.rglob("*"))
    lab.refuse(r"no checkpoint in .*run is finite .*norm\.weight is not finite", "train.steps=8", resume=True)
    assert sorted(stopped.rglob("*")) == before
    with pytest.raises(ValueError, match=r"step-6: weight norm\.weight is not finite"):
        convert(stopped, stopped / "converted")


@pytest.mark.slow
def test_non_finite_optimizer_state_is_not_saved(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil_state(step: Step, done: int) -> None:
        momenta = [tensor for name, tensor in step.optimizer.tensors().items() if "/momentum" in name]
        momenta[0].view(-1)[0] = math.nan if done == 4 else momenta[0].view(-1)[0]

    after_each_step(monkeypatch, spoil_state)
    sentence = r"/momentum is no longer finite, so it was not saved; .* is .*step-2"
    lab.refuse(sentence, error=TrainingStopped)
    assert lab.saved() == [2]
