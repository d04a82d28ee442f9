"""The examples of docs/use-in-your-model.md run as written and do what the page says."""

import math
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

import residua
from residua.config.settings import ConfigError
from residua.model.equivalence import InitFidelity
from residua.model.topology import build_topology
from tests.docs.test_documentation import python_blocks
from tests.model.depth import SMALL, drive, embedding_and_outputs

PAGE = "use-in-your-model.md"


@pytest.fixture(scope="module")
def gpt() -> dict:
    scope: dict = {}
    exec(python_blocks(PAGE)[0], scope)
    return scope


def test_plain_gpt_takes_sixty_lines_with_three_of_ours():
    lines = [line for line in python_blocks(PAGE)[0].splitlines() if line.strip()]
    end = next(i for i, line in enumerate(lines) if line.startswith("block ="))
    assert end <= 60
    assert sum("# " in line and line.rstrip()[-1].isdigit() for line in lines) == 3


@torch.no_grad()
def test_the_plain_gpt_starts_at_the_uniform_loss():
    scope: dict = {}
    exec(python_blocks(PAGE)[0], scope)
    tokens = torch.randint(256, (4, 33))
    for name in ("block", "mgr", "plain"):
        assert float(scope["loss"](scope[name], tokens)) == pytest.approx(math.log(256), abs=0.1), name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["block", "mgr"])
def test_block_attnres_and_mgr_train_in_the_plain_gpt(gpt, name):
    model, tokens = gpt[name], torch.randint(256, (2, 17))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        loss = gpt["loss"](model, tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.5
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.topology.parameters())


def test_additive_topology_equals_the_original_gpt(gpt):
    model, tokens = gpt["plain"], torch.randint(256, (2, 9))
    h = model.tokens(tokens) + model.positions.weight[:9]
    for sublayer in model.sublayers:
        h = h + sublayer(h)
    assert torch.equal(model(tokens), model.norm(h) @ model.tokens.weight.T)


@pytest.fixture(scope="module")
def depth() -> Iterator[dict]:
    """The page's code as a module: the compiler imports what it compiles by name."""
    pytest.importorskip("transformers")
    page = ModuleType("llama_of_the_page")
    sys.modules[page.__name__] = page
    exec(python_blocks(PAGE)[1], vars(page))
    yield vars(page)
    del sys.modules[page.__name__]


def llama_with(depth: dict, topology: dict, **keys: object):
    config = type(depth["config"])(**depth["config"].to_dict() | {"topology": topology} | keys)
    return depth["DepthLlama"](config).eval()


TOPOLOGIES = [
    {"kind": "multi_gate", "streams": 3},
    *(pytest.param({"kind": kind}, marks=pytest.mark.nightly) for kind in ("additive", "mhc", "dense")),
]


@pytest.mark.slow
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda topology: topology["kind"])
def test_llama_with_a_topology_caches_compiles_and_checkpoints(depth, topology):
    model = llama_with(depth, topology)
    tokens = torch.randint(97, (2, 9))
    settings = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(tokens, **settings), model.generate(tokens, **settings, use_cache=False))

    with torch.no_grad():
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(tokens, use_cache=False).logits, model(tokens).logits)

    model.train()
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert any(name.startswith("topology.") for name in found[0]) == (topology["kind"] != "additive")
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.slow
def test_llama_with_a_topology_converts_from_and_to_a_llama(depth, tmp_path):
    plain = depth["LlamaForCausalLM"](depth["config"]).eval()
    plain.save_pretrained(tmp_path / "plain")
    tokens = torch.randint(97, (2, 9))
    for topology in ({"kind": "additive"}, {"kind": "block_attnres", "sublayers_per_block": 2}):
        config = type(depth["config"])(**depth["config"].to_dict() | {"topology": topology})
        model = depth["DepthLlama"].from_pretrained(tmp_path / "plain", config=config).eval()
        with torch.no_grad():
            torch.testing.assert_close(model(tokens).logits, plain(tokens).logits, rtol=1e-4, atol=1e-4)
            for parameter in model.topology.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
            model.save_pretrained(tmp_path / topology["kind"])
            again = depth["DepthLlama"].from_pretrained(tmp_path / topology["kind"]).eval()
            assert torch.equal(again(tokens).logits, model(tokens).logits)


@pytest.mark.nightly
def test_compiled_rewrites_keep_loss_and_gradients(depth):
    scope = {"llama": llama_with(depth, {"kind": "full_attnres"}, num_hidden_layers=1)}
    exec(python_blocks("api.md")[-1], scope)
    tokens = torch.randint(97, (2, 9))
    model = scope["llama"]
    losses = []
    for run in (scope["compiled"], lambda tokens: model(input_ids=tokens, labels=tokens, use_cache=False).loss):
        model.zero_grad()
        loss = run(tokens)
        loss.backward()
        losses.append((float(loss), model.topology.reads[0].query.grad.clone()))
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-5)
    torch.testing.assert_close(losses[0][1], losses[1][1], rtol=1e-4, atol=1e-6)


# The input of readers in place of the sum of the embedding and all earlier outputs: in a new topology, and after
# `init_as_additive`. docs/retrofit.md says the second in words.
SUM, MULTIPLE, ELSE = "the sum", "a multiple", "something else"
BEGIN = {
    "additive": (SUM, SUM),
    "layer_factor": (SUM, SUM),
    "scaled": (ELSE, SUM),
    "scaled scalar": (ELSE, SUM),
    **dict.fromkeys(("lns", "keel", "deepnorm", "resi_dual"), (ELSE, ELSE)),
    "x0": (ELSE, ELSE),
    "x0 sublayer": (ELSE, SUM),
    "laurel": (SUM, SUM),
    **dict.fromkeys(("frac", "frac static"), (SUM, SUM)),
    "dense": (SUM, SUM),
    "dense dilated": (SUM, SUM),
    "hyper": (MULTIPLE, MULTIPLE),
    **dict.fromkeys(("hyper static", "hyper identity", "hyper cyclic", "hyper_single_pass"), (MULTIPLE, MULTIPLE)),
    "full_attnres": (MULTIPLE, MULTIPLE),
    "full_attnres window": (ELSE, ELSE),
    "boundary_attnres": (ELSE, ELSE),
    "block_attnres": (MULTIPLE, MULTIPLE),
    "delta_attnres": (MULTIPLE, MULTIPLE),
    "delta_attnres block": (MULTIPLE, MULTIPLE),
    "multi_gate": (ELSE, MULTIPLE),
    "multi_gate independent": (ELSE, MULTIPLE),
    "highway": (ELSE, MULTIPLE),
    "highway elementwise": (ELSE, MULTIPLE),
    "gated_residual": (ELSE, ELSE),
    "mhc": (ELSE, MULTIPLE),
    "mhc_lite": (ELSE, MULTIPLE),
}


@pytest.mark.parametrize("name", BEGIN)
def test_topologies_start_as_documented_relative_to_the_sum(name):
    known = SMALL | {"boundary_attnres": residua.choices.BoundaryAttnRes(sublayers_per_block=3)}
    topology = build_topology(known[name], 6, 8).double()
    x, y = embedding_and_outputs(6, 8)
    sums = [x + sum(y[:k]) for k in range(7)]
    found = [kind_of(drive(topology, x, y), sums)]
    kept = topology.initialization().init_as_additive()
    found.append(kind_of(drive(topology, x, y), sums))
    assert tuple(found) == BEGIN[name]
    assert (
        topology.initialization().is_additive
        or {SUM: InitFidelity.EXACTLY, MULTIPLE: InitFidelity.UP_TO_EPS, ELSE: InitFidelity.NOT}[found[1]] is kept
    )


def kind_of(inputs, sums) -> str:
    ratios = [h / s for h, s in zip(inputs, sums, strict=True)]
    if any((r - r.mean()).abs().max() > 1e-9 for r in ratios):
        return ELSE
    return SUM if all((r - 1).abs().max() < 1e-12 for r in ratios) else MULTIPLE


def test_topology_is_built_from_a_table_or_refused():
    made = residua.build_topology({"kind": "multi_gate", "streams": 3}, 6, 8)
    same = build_topology(residua.choices.MultiGate(streams=3), 6, 8)
    assert made.ablations().streams == 3 and type(made) is type(same)
    for table, sentence in (({"kind": "multigate"}, "multi_gate"), ({"kind": "multi_gate", "streems": 3}, "streems")):
        with pytest.raises(ConfigError, match=sentence) as caught:
            residua.build_topology(table, 6, 8)
        assert "\n" not in str(caught.value)
