"""The examples of docs/use-in-your-model.md run as written and do what the page says."""

import pytest
import torch

from tests.docs.test_documentation import python_blocks

PAGE = "use-in-your-model.md"


@pytest.fixture(scope="module")
def gpt() -> dict:
    scope: dict = {}
    exec(python_blocks(PAGE)[0], scope)
    return scope


def test_the_plain_gpt_is_about_sixty_lines_of_which_three_are_residuas():
    lines = [line for line in python_blocks(PAGE)[0].splitlines() if line.strip()]
    end = next(i for i, line in enumerate(lines) if line.startswith("block ="))
    assert end <= 60
    assert sum("# " in line and line.rstrip()[-1].isdigit() for line in lines) == 3


@pytest.mark.parametrize("name", ["block", "mgr"])
def test_block_attention_residuals_and_mgr_train_in_the_plain_gpt(gpt, name):
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


def test_additive_is_the_gpt_one_had(gpt):
    model, tokens = gpt["plain"], torch.randint(256, (2, 9))
    h = model.tokens(tokens) + model.positions.weight[:9]
    for sublayer in model.sublayers:
        h = h + sublayer(h)
    assert torch.equal(model(tokens), model.norm(h) @ model.tokens.weight.T)


@pytest.fixture(scope="module")
def llama() -> dict:
    pytest.importorskip("transformers")
    scope: dict = {}
    exec(python_blocks(PAGE)[1], scope)
    return scope


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tolerance"), [("same", 1e-5), ("hyper", 1e-4), ("attnres", 1e-4)])
def test_a_converted_llama_gives_the_llamas_logits(llama, name, tolerance):
    tokens = torch.randint(97, (2, 13))
    with torch.no_grad():
        torch.testing.assert_close(llama[name](tokens), llama["llama"](tokens).logits, rtol=1e-5, atol=tolerance)


@pytest.mark.slow
def test_a_converted_llama_with_another_topology_trains(llama):
    tokens = torch.randint(97, (2, 13))
    model = llama["mgr"]
    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    assert all(p.grad is not None for p in model.parameters())
    with torch.no_grad():
        assert not torch.allclose(model(tokens), llama["llama"](tokens).logits, atol=1e-2)


@pytest.mark.slow
def test_tied_llamas_convert_too(llama):
    config = type(llama["config"])(**llama["config"].to_dict() | {"tie_word_embeddings": True})
    tied = llama["LlamaForCausalLM"](config).eval()
    tokens = torch.randint(97, (1, 7))
    with torch.no_grad():
        ours = llama["converted"](tied, {"kind": "additive"})(tokens)
        torch.testing.assert_close(ours, tied(tokens).logits, rtol=1e-5, atol=1e-5)
