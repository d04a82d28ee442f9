"""Taps: tensors recorded by their published names."""

import pytest
import torch

import residua
from residua.model import taps
from tests.model.depth import SMALL
from tests.model.small import small, tokens_and_targets

BATCH, LENGTH, WIDTH, SUBLAYERS = 2, 6, 16, 6


def seen_in(**tables: object) -> dict[str, torch.Tensor]:
    model = residua.build(small(**tables))
    with taps.record() as seen:
        model(tokens_and_targets()[0])
    return seen


def names(pattern: str, indices: range = range(SUBLAYERS)) -> set[str]:
    return {pattern.format(k) for k in indices}


@pytest.mark.parametrize("topology", SMALL)
def test_every_model_publishes_sublayer_inputs_and_outputs(topology: str) -> None:
    seen = seen_in(topology=SMALL[topology].model_dump(exclude_none=True))
    for name in names("sublayer.{}.input") | names("sublayer.{}.output") | {"final.input"}:
        assert seen[name].shape == (BATCH, LENGTH, WIDTH)


DEPTH_TAPS = {
    "full_attnres": {"depth.{}.weights": range(6)},
    "block_attnres": {"depth.{}.weights": range(6)},
    "multi_gate": {"depth.{}.weights": range(6), "depth.{}.beta": range(3, 6), "depth.{}.streams": range(6)},
    "highway": {"depth.{}.beta": range(6)},
    "hyper": {"depth.{}.pre": range(6), "depth.{}.mix": range(6), "depth.{}.streams": range(6)},
    "dense": {"depth.{}.weights": range(1, 6, 2)},
    "x0": {"depth.{}.weights": range(1, 6, 2)},
    "x0 sublayer": {"depth.{}.weights": range(6)},
    "gated_residual": {"depth.{}.weights": range(6), "depth.{}.streams": range(6)},
    "delta_attnres": {"depth.{}.weights": range(5)},
    "additive": {},
}


@pytest.mark.parametrize("topology", DEPTH_TAPS)
def test_topologies_publish_their_weights_after_each_sublayer(topology: str) -> None:
    seen = seen_in(topology=SMALL[topology].model_dump(exclude_none=True))
    published = {name for name in seen if name.startswith("depth.")}
    assert published == set().union(*(names(p, r) for p, r in DEPTH_TAPS[topology].items()))


def test_weights_and_gates_have_one_entry_per_source() -> None:
    seen = seen_in(topology={"kind": "multi_gate", "streams": 3})
    assert [seen[f"depth.{k}.weights"].shape[-1] for k in range(6)] == [2, 3, 3, 3, 3, 3]
    assert seen["depth.4.beta"].shape == (BATCH, LENGTH, 3)
    assert seen_in(topology={"kind": "dense"})["depth.3.weights"].shape == (BATCH, LENGTH, 3)


@pytest.mark.parametrize("topology", ["full_attnres", "block_attnres", "multi_gate"])
def test_published_depth_weights_reproduce_the_next_input(topology: str) -> None:
    """The published weights times the sources are the next input: outputs for Full, streams for the others."""
    seen = seen_in(topology=SMALL[topology].model_dump(exclude_none=True))
    for k in range(2):  # until the first block or the filling of the streams ends
        sources = [seen["sublayer.0.input"], *(seen[f"sublayer.{i}.output"] for i in range(k + 1))]
        if topology == "block_attnres":
            sources = [sources[0], sum(sources[1:])]
        weights = seen[f"depth.{k}.weights"]
        mixed = sum(weights[..., i, None] * source for i, source in enumerate(sources))
        torch.testing.assert_close(mixed, seen[f"sublayer.{k + 1}.input"])


@pytest.mark.parametrize(("gate", "width"), [("elementwise", 8), ("headwise", 1)])
def test_attention_gates_are_published_after_the_sigmoid(gate: str, width: int) -> None:
    seen = seen_in(attention={"kind": "softmax", "heads": 2, "gate": gate})
    for layer in range(3):
        value = seen[f"attention.{layer}.gate"]
        assert value.shape == (BATCH, LENGTH, 2, width)
        assert value.min() > 0 and value.max() < 1


def test_nothing_is_computed_or_kept_without_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> torch.Tensor:
        raise AssertionError("computed for nobody")

    model = residua.build(small(topology={"kind": "multi_gate"}))
    tokens, _ = tokens_and_targets()
    monkeypatch.setattr(residua.ops, "pool_weights", never)
    model(tokens)
    with pytest.raises(AssertionError, match="for nobody"), taps.record():
        model(tokens)
    model(tokens)


def test_recordings_nest_and_stop_at_their_end() -> None:
    tensor = torch.ones(1)
    with taps.record() as outer:
        taps.tap("a", tensor)
        with taps.record() as inner:
            taps.tap("b", lambda: tensor)
        taps.tap("c", tensor)
    taps.tap("d", tensor)
    assert set(outer) == {"a", "c"} and set(inner) == {"b"}


def test_recording_changes_no_output() -> None:
    model = residua.build(small(topology={"kind": "block_attnres", "sublayers_per_block": 2}))
    tokens, _ = tokens_and_targets()
    plain = model(tokens)
    with taps.record() as seen:
        assert torch.equal(model(tokens), plain)
    assert seen["sublayer.0.output"].grad_fn is not None
