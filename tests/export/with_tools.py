"""Uses of an exported folder by the tools around transformers.

Nothing here imports Residua. `test_export_tools.py` runs these checks in its own interpreter, and runs this file as a
script in an environment where Residua is not installed. Beside each folder lies FOLDER.safetensors with `tokens` [B, T]
and Residua's own `logits` [B, T, V] of them.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

NEW_VOCABULARY = 300


def opened(folder: Path, **settings: Any) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, implementation="file", **settings)
    assert type(model.model.decoder).__module__.startswith("transformers_modules")
    return model.eval()


def expected(folder: Path) -> tuple[Tensor, Tensor]:
    saved = load_file(folder.with_suffix(".safetensors"))
    return saved["tokens"], saved["logits"]


def close(found: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def lora(folder: Path, targets: Any, home: Path) -> None:
    """Adapters change the logits, are trained and saved, come back, and can be merged."""
    from peft import LoraConfig, PeftModel, get_peft_model

    tokens, logits = expected(folder)
    settings = LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False)
    model = get_peft_model(opened(folder), settings)
    adapted = model(tokens).logits
    assert (adapted - logits).abs().max() > 1e-3
    model.train()(tokens, labels=tokens).loss.backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert trained and all("lora_" in name for name in trained)
    assert trained == {name for name, p in model.named_parameters() if p.requires_grad}
    model.eval().save_pretrained(home / "adapter")
    again = PeftModel.from_pretrained(opened(folder), home / "adapter").eval()
    close(again(tokens).logits, adapted)
    close(again.merge_and_unload()(tokens).logits, adapted, 1e-4)


def lora_by_name(folder: Path, home: Path) -> None:
    lora(folder, ["project", "out"], home)


def lora_all_linear(folder: Path, home: Path) -> None:
    """Every projection is found, and the head is not."""
    lora(folder, "all-linear", home)


@torch.no_grad()
def resize(folder: Path, home: Path) -> None:
    """New tokens are embedded and predicted, old logits stay, and the saved model has the new vocabulary."""
    tokens, logits = expected(folder)
    model = opened(folder)
    model.resize_token_embeddings(NEW_VOCABULARY, mean_resizing=False)
    new = torch.full_like(tokens, NEW_VOCABULARY - 1)
    close(model(tokens).logits[..., : logits.shape[-1]], logits)
    made = model(new).logits
    assert made.shape[-1] == NEW_VOCABULARY and torch.isfinite(made).all()
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == model.config.tie_word_embeddings
    model.save_pretrained(home / "resized")
    close(opened(home / "resized")(new).logits, made)


@torch.no_grad()
def disk_offload(folder: Path, home: Path) -> None:
    """No weight stays in memory, and the logits and the text are the same."""
    tokens, logits = expected(folder)
    model = opened(folder, device_map={"": "disk"}, offload_folder=str(home / "offload"))
    given = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    for _ in range(2):
        close(model(tokens).logits, logits)
        assert all(p.is_meta for p in model.parameters())
    assert torch.equal(model.generate(tokens, **given), opened(folder).generate(tokens, **given))


def reentrant_checkpointing(folder: Path, home: Path) -> None:
    """The gradients are those without checkpointing."""
    tokens, _ = expected(folder)
    model = opened(folder).train()
    plain = gradients(model, tokens)
    for reentrant in (True, False):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        again = gradients(model, tokens)
        assert plain.keys() == again.keys()
        for name, gradient in plain.items():
            error = (again[name] - gradient).abs().max()
            assert error <= 1e-5 * gradient.abs().max() + 1e-7, name


def gradients(model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(tokens, labels=tokens).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@torch.no_grad()
def hidden_states(folder: Path, home: Path) -> None:
    """One state per layer and the final one; embedded tokens give the same as tokens, also in `generate`."""
    tokens, logits = expected(folder)
    model = opened(folder)
    output = model(tokens, output_hidden_states=True, use_cache=False)
    states = output.hidden_states
    assert len(states) == model.config.num_hidden_layers + 1
    assert all(state.shape == states[0].shape for state in states) and model(tokens).hidden_states is None
    read, cap = model.lm_head(states[-1]), model.config.residua.get("logit_softcap")
    close(read if cap is None else cap * (read / cap).tanh(), logits)
    embedded = model.get_input_embeddings()(tokens)
    if model.model.decoder.token_readers:  # vectors have no ids
        try:
            model(inputs_embeds=embedded)
        except ValueError as refusal:
            assert "reads token ids" in str(refusal)
            return
        raise AssertionError("vectors were taken for tokens")
    close(model(inputs_embeds=embedded).logits, logits)
    given = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    written = model.generate(inputs_embeds=embedded, **given)
    assert torch.equal(written, model.generate(tokens, **given)[:, tokens.shape[1] :])


@torch.no_grad()
def int8_of_torchao(folder: Path, home: Path) -> None:
    """torchao finds the projections, and eight bits change little."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    tokens, logits = expected(folder)
    model = opened(folder)
    quantize_(model.model, Int8WeightOnlyConfig())
    weights = [m.weight for m in model.model.modules() if isinstance(m, nn.Linear)]
    assert weights and all(type(weight.data) is not Tensor for weight in weights)
    error = (model(tokens).logits - logits).norm() / logits.norm()
    assert 0 < error < 0.1, error


CHECKS: dict[str, Callable[[Path, Path], None]] = {
    check.__name__: check
    for check in (
        lora_by_name,
        lora_all_linear,
        resize,
        disk_offload,
        reentrant_checkpointing,
        hidden_states,
        int8_of_torchao,
    )
}


def main() -> None:
    try:
        import residua  # noqa: F401
    except ImportError:
        pass
    else:
        sys.exit("Residua is installed here")
    torch.set_num_threads(1)
    home, *folders = map(Path, sys.argv[1:])
    passed = {}
    for folder in folders:
        for name, check in CHECKS.items():
            own = home / folder.name / name
            own.mkdir(parents=True)
            check(folder, own)
        passed[folder.name] = list(CHECKS)
    print(json.dumps(passed))


if __name__ == "__main__":
    main()
