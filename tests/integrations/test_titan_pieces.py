"""Refusals of the integration, and how it reads checkpoints; torchtitan is not needed."""

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from residua.config.run import RunConfig
from residua.config.settings import ConfigError
from residua.integrations.torchtitan.checkpoint import pack, unpack
from residua.integrations.torchtitan.compat import find_run, parse_run
from residua.integrations.torchtitan.division import find_splits, narrow, pieces
from residua.integrations.torchtitan.refusals import refuse_engine, refuse_run
from residua.model.decoder import Decoder
from tests.integrations.cases import MODELS
from tests.model.small import small


class FullAC:
    class Config:
        pass


class SelectiveAC:
    class Config:
        pass


def settings(**changed: Any) -> SimpleNamespace:
    """torchtitan's settings as the registry makes them, with changes: `parallelism__tensor_parallel_degree=2`."""
    tables: dict[str, Any] = {
        "parallelism": {
            "spmd_backend": "partial_dtensor",
            "tensor_parallel_degree": 1,
            "context_parallel_degree": 1,
            "expert_parallel_degree": 1,
            "pipeline_parallel_degree": 1,
            "pipeline_parallel_schedule": "1F1B",
            "module_fqns_per_model_part": None,
            "pipeline_parallel_schedule_csv": "",
            "enable_sequence_parallel": True,
        },
        "training": {"dtype": "float32", "seq_len": 64, "enable_cpu_offload": False, "steps": 8},
        "lr_scheduler": {"total_steps": None},
        "compile": {"enable": False, "backend": "inductor"},
        "validator": {"enable": False},
        "checkpoint": {"create_seed_checkpoint": False, "async_mode": "disabled"},
    }
    policy = changed.pop("activation_checkpoint", None)
    for key, value in changed.items():
        table, _, name = key.partition("__")
        tables[table][name] = value
    return SimpleNamespace(**{k: SimpleNamespace(**v) for k, v in tables.items()}, activation_checkpoint=policy)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "backend": ({"parallelism__spmd_backend": "spmd_types"}, "spmd_types.*Residua"),
    "expert": ({"parallelism__expert_parallel_degree": 2}, "expert_parallel_degree 2.*moe"),
    "uneven": ({"parallelism__tensor_parallel_degree": 3}, "tensor_parallel_degree 3 does not divide model"),
    "whole states": (
        {"parallelism__tensor_parallel_degree": 2, "parallelism__enable_sequence_parallel": False},
        "tensor_parallel_degree 2 without enable_sequence_parallel.*Residua",
    ),
    "copied pieces": (
        {"parallelism__tensor_parallel_degree": 2, "checkpoint__async_mode": "async"},
        "tensor_parallel_degree 2.*async_mode async.*Residua",
    ),
    "schedule": (
        {"parallelism__pipeline_parallel_degree": 2, "parallelism__pipeline_parallel_schedule": "ZBVZeroBubble"},
        "ZBVZeroBubble.*Residua.*1F1B",
    ),
    "selective": ({"activation_checkpoint": SelectiveAC.Config()}, "selective.*torchtitan.*Residua"),
    "compiler": ({"compile__enable": True, "compile__backend": "eager"}, "eager.*Residua.*inductor"),
    "validator": ({"validator__enable": True}, "validator.*torchtitan.*residua eval"),
    "offload": ({"training__enable_cpu_offload": True}, "cpu_offload.*Residua's Muon"),
    "rounded": ({"training__dtype": "bfloat16"}, "dtype bfloat16.*Residua"),
    "long": ({"training__seq_len": 4096}, "seq_len 4096.*model.context"),
    "no step": ({"training__steps": 0}, "training.steps 0.*Residua.*at least one step"),
    "seed": ({"checkpoint__create_seed_checkpoint": True}, "create_seed_checkpoint.*Residua"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_engine_settings_are_refused_by_name(case: str) -> None:
    changes, words = REFUSED[case]
    run = RunConfig.find("tiny")
    refuse_engine(settings(activation_checkpoint=FullAC.Config()), run)
    with pytest.raises(ConfigError, match=words) as refused:
        refuse_engine(settings(**changes), run)
    assert str(refused.value).count(". ") == 0 and str(refused.value).endswith(".")


OF_MODELS: dict[str, tuple[str, list[str], str]] = {
    "linear": ("context", ["model.attention={kind='kimi_delta', heads=2, head_dim=8}"],
               "context_parallel_degree 2.*kimi_delta"),
    "odd heads": ("context", ["model.attention={kind='gated_deltanet', key_heads=1, value_heads=2, head_dim=8}"],
                  "context_parallel_degree 2 does not divide attention.key_heads"),
    "growing": ("context", ["model.attention.rope_scaling={kind='dynamic_ntk', factor=2.0, original_context=64}"],
                "context_parallel_degree 2.*dynamic_ntk"),
    "biased": ("tensor", ["model.attention.bias=all"], "tensor_parallel_degree 2.*attention.bias"),
    "mixed across heads": ("tensor", ["model.anchors.kind=lime"], "tensor_parallel_degree 2.*anchors.kind = 'lime'"),
    "two widths": ("tensor", ["model.attention.window=4", "model.attention.full={kv_heads=1}"],
                   "tensor_parallel_degree 2.*attention.full"),
    "normed together": ("tensor", ["model.attention.qk_norm=rms_all"], "tensor_parallel_degree 2.*rms_all"),
}  # fmt: skip


@pytest.mark.parametrize("case", OF_MODELS)
def test_models_that_cannot_be_divided_are_refused(case: str) -> None:
    axis, changes, words = OF_MODELS[case]
    run = RunConfig.find("tiny").override(changes)
    with pytest.raises(ConfigError, match=words):
        refuse_engine(settings(**{f"parallelism__{axis}_parallel_degree": 2}), run)


@pytest.mark.parametrize("model", ["grouped", "hybrid", "experts", "biased"])
def test_parameter_shares_have_no_gaps_or_overlaps(model: str) -> None:
    """Every element of a divided parameter is on one rank, in the part it belongs to."""
    biased = {"attention": {"kind": "softmax", "heads": 4, "kv_heads": 2, "gate": "headwise", "bias": "qkv"}}
    config = small(**{"width": 32, "layers": 2, **(biased if model == "biased" else MODELS[model])})
    whole = Decoder(config)
    ranks = [Decoder(narrow(config, 2)) for _ in range(2)]
    splits = find_splits(ranks[0], whole)
    assert any(len(split.parts) > 1 for split in splits.values())
    for name, split in splits.items():
        value = whole.get_parameter(name)
        seen = torch.zeros_like(value)
        for rank, mine in enumerate(ranks):
            own = mine.get_parameter(name)
            assert own.numel() * 2 == value.numel()
            for first in range(0, len(own), 5):  # as FSDP2 divides it further
                for place, piece in pieces(split, rank, 2, first, own[first : first + 5]):
                    seen[tuple(slice(o, o + n) for o, n in zip(place, piece.shape, strict=True))] += 1
        assert torch.equal(seen, torch.ones_like(seen)), name


LOOP = "model.order={kind='loop', prelude=1, coda=1, turns=2}"


@pytest.mark.parametrize(
    ("preset", "change", "words"),
    [
        ("tiny-moe", "train.balance.load=same_step", r"same_step.*torchtitan"),
        ("tiny-moe", "model.ffn.top_k=1", r"model\.ffn\.top_k = 1.*learns nothing"),
        ("tiny", LOOP, r"order.kind = 'loop' runs a layer several times, but torchtitan.*use `residua train`\.$"),
    ],
)
def test_run_settings_without_an_equivalent_are_refused(preset: str, change: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        refuse_run(RunConfig.find(preset).override([change]))


def test_a_run_name_is_a_preset_or_a_file_with_changes(tmp_path: Path) -> None:
    run = find_run("tiny model.vocab_size=512 train.steps=300")
    assert (run.model.vocab_size, run.train.steps) == (512, 300)
    (tmp_path / "own run.toml").write_text('extends = "tiny"\n[model]\nvocab_size = 640\n')
    assert find_run(f"'{tmp_path / 'own run.toml'}' train.steps=300").model.vocab_size == 640
    assert parse_run(run.to_toml()) == run
    with pytest.raises(ConfigError, match="tinny"):
        find_run("tinny")


def test_a_data_position_survives_packing_in_a_tensor() -> None:
    place = {"seed": 3, "tokenizer_hash": "ab", "epoch": 1, "position": 7}
    assert unpack(pack(place)) == place


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("ran",)


@pytest.mark.slow
def test_checkpoint_that_names_a_function_is_refused_not_run(tmp_path: Path, capsys) -> None:
    from residua.integrations.torchtitan.convert import convert

    step = tmp_path / "dump/checkpoint/step-2"
    step.mkdir(parents=True)
    (tmp_path / "dump/config.toml").write_text(RunConfig.find("tiny").to_toml())
    (step / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match=r"builtins\.print"):
        convert(tmp_path / "dump", tmp_path / "run")
    assert "ran" not in capsys.readouterr().out and not (tmp_path / "run").exists()
