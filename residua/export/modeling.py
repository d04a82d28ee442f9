"""A language model with Residua's depth architecture for Hugging Face transformers, as its two usual classes.

An exported folder holds a copy of this file and of the modules that it imports. Where Residua is
installed, its decoder runs instead of the copy, with fused kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from residua.config.model import ModelConfig
from residua.errors import UserError
from residua.export.bridge import Attention, Past
from residua.export.configuration import ResiduaConfig
from residua.model.context import one_read
from residua.model.decoder import Decoder
from residua.ops._runtime.numeric import soft_cap


def build_decoder(config: ResiduaConfig) -> nn.Module:
    """Build the installed Residua's decoder, which has kernels, or the one imported here; the head is kept outside."""
    if config.residua is None:
        raise UserError("the configuration has no table 'residua': write it with `residua export`.")
    tables = config.residua | {"head": {"kind": "tied"}}
    if config.implementation not in ("auto", "library", "file"):
        raise UserError(f"implementation {config.implementation!r} does not exist: use 'auto', 'library' or 'file'.")
    library = None if config.implementation == "file" else _library()
    if library is None and config.implementation == "library":
        raise UserError("implementation is 'library', but Residua is not installed: use 'auto' or 'file'.")
    return Decoder(ModelConfig(**tables)) if library is None else library.build(library.ModelConfig(**tables))


def _library() -> Any:
    """Return Residua if it is installed. Python would also import any folder of that name, which is not Residua."""
    try:
        library = import_module("residua")
    except ImportError:
        return None
    return library if hasattr(library, "build") else None


class ResiduaPreTrainedModel(PreTrainedModel):
    """The base class of both models."""

    config: ResiduaConfig
    config_class = ResiduaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_attention_backend = True
    _no_split_modules = ["Decoder"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012

    def _init_weights(self, module: nn.Module) -> None:
        """Each module initialises its own parameters; the head is initialised as configured.

        So are the embedding and head that transformers creates for a new vocabulary.
        """
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if all(getattr(tensor, "_is_hf_initialized", False) for tensor in tensors):
            return
        if type(module) in (nn.Linear, nn.Embedding):
            tables = self.config.residua or {}
            zero = type(module) is nn.Linear and tables["head"].get("init") == "zero"
            weight: Any = module.weight
            nn.init.zeros_(weight) if zero else nn.init.normal_(weight, std=tables["init"]["std"])
        elif callable(reset := getattr(module, "reset_parameters", None)):
            reset()

    def _flex_attn_can_dispatch(self, is_init_check: bool = False) -> bool:
        raise UserError('attn_implementation = "flex_attention" is not supported: use "sdpa".')

    def _flash_attn_can_dispatch(self, flash_attn_version: int, is_init_check: bool = False) -> bool:
        raise UserError(f'attn_implementation = "flash_attention_{flash_attn_version}" is not supported: use "sdpa".')

    def _set_gradient_checkpointing(  # type: ignore[override]
        self, enable: bool = True, gradient_checkpointing_func: Callable[..., Any] = checkpoint, **kwargs: Any
    ) -> None:
        """In one of every `every_n_layers`, sublayers only store their inputs and run again in the backward pass."""
        super()._set_gradient_checkpointing(enable, gradient_checkpointing_func, **kwargs)
        decoder: Any = self.base_model.decoder
        decoder.anchors.shares_gradient = not enable
        for k, sublayer in enumerate(decoder.sublayers):
            sublayer.__dict__.pop("forward", None)
            if enable and k // 2 % kwargs.get("every_n_layers", 1) == 0:
                sublayer.forward = partial(recomputed, sublayer.forward, gradient_checkpointing_func)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """Resize like transformers and update Residua's tables, so that a saved model loads with its new vocabulary.

        Other tables of token ids get rows of zeros, which add nothing.
        """
        before = self.config.vocab_size
        embedding = super().resize_token_embeddings(*args, **kwargs)
        decoder: Any = self.base_model.decoder
        new = self.config.vocab_size
        for table in decoder.modules():
            if isinstance(table, nn.Embedding) and table is not embedding and table.num_embeddings == before != new:
                rows = nn.functional.pad(table.weight.detach(), (0, 0, 0, new - before))
                table.weight, table.num_embeddings = nn.Parameter(rows), new
        self.config.residua = {**(self.config.residua or {}), "vocab_size": self.config.vocab_size}
        return embedding


class ResiduaModel(ResiduaPreTrainedModel):
    """Tokens in, final normed states out."""

    def __init__(self, config: ResiduaConfig) -> None:
        super().__init__(config)
        self.decoder: Any = build_decoder(config)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> Any:
        return self.decoder.embed

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.decoder.embed = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """attention_mask [B, past + T] is 0 for padding, on either side. Without a cache and a mask, position_ids that
        start again begin a new document. inputs_embeds [B, T, C] are outputs of the module that `get_input_embeddings`
        returns.

        hidden_states are the inputs of all layers, as the topology computes them, then the final normed states.
        """
        tokens = inputs_embeds if input_ids is None else input_ids
        if tokens is None or (input_ids is not None and inputs_embeds is not None):
            raise UserError("this model takes either input_ids or inputs_embeds.")
        if kwargs.pop("output_attentions", None) or self.config.output_attentions:
            raise UserError("this model does not return attention weights: leave output_attentions out.")
        if self.gradient_checkpointing and self.training:
            use_cache, past_key_values = False, None
        use_cache = not self.training if use_cache is None else use_cache
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        mask = attention_mask if _is_needed(attention_mask, cached=past_key_values is not None) else None
        host = _host_attention(self.config, kwargs)
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        with offloaded_weights(self.decoder), _layer_inputs(self.decoder.sublayers[::2] if wanted else ()) as inputs:
            if past_key_values is None and mask is None and host is None:
                hidden = self.decoder.hidden(tokens, _documents(position_ids))
            else:
                borrowed = self.decoder.config.borrowed
                past = Past(past_key_values, self.config.layer_types, tokens, mask, position_ids, host, borrowed)
                hidden = self.decoder.hidden(tokens, cache=past)
        states: Any = (*inputs, hidden) if wanted else None
        output = BaseModelOutputWithPast(
            last_hidden_state=hidden, past_key_values=past_key_values, hidden_states=states
        )
        return output.to_tuple() if return_dict is False else output


@contextmanager
def _layer_inputs(sublayers: Iterable[nn.Module]) -> Iterator[list[Tensor]]:
    """Collect the inputs of these sublayers."""
    inputs: list[Tensor] = []
    hooks = [s.register_forward_pre_hook(lambda _, args: inputs.append(one_read(args[0]))) for s in sublayers]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()


def _host_attention(config: ResiduaConfig, settings: dict[str, Any]) -> Attention | None:
    """The attention that a host program such as vLLM has registered, with the keywords that it expects."""
    name = config._attn_implementation
    if name in (None, "sdpa", "eager"):
        return None
    if (config.residua or {}).get("logit_softcap") is not None:  # hosts compute logits themselves
        raise UserError(f"attn_implementation {name!r} does not support capped logits: use 'sdpa'.")
    return partial(ALL_ATTENTION_FUNCTIONS[name], **settings)


def _is_needed(mask: Tensor | None, cached: bool) -> bool:
    """Return whether the mask has an effect: no real token sees padding on its right, unless more tokens follow."""
    if mask is None:
        return False
    if mask.dim() != 2:
        raise UserError(f"attention_mask has {mask.dim()} axes: use [batch, length] with 0 for padding.")
    return bool((mask == 0).any() if cached else (mask[:, 1:] > mask[:, :-1]).any())


def _documents(positions: Tensor | None) -> Tensor | None:
    """Number each token's document: a new one begins where positions [B, T] restart; None if they never do."""
    if positions is None:
        return None
    begins = torch.diff(positions, prepend=positions[:, :1] - 1) != 1
    return begins.cumsum(1) if bool(begins[:, 1:].any()) else None


@contextmanager
def offloaded_weights(decoder: Any) -> Iterator[None]:
    """Load weights that accelerate has offloaded: a sublayer's while it runs, all others for the whole forward pass.

    accelerate loads a module's weights when the module is called. But topologies, anchors and gated norms read
    parameters of modules that they do not call.
    """
    with ExitStack() as stack:
        if not torch.compiler.is_compiling() and any(map(_is_offloaded, decoder.modules())):
            for part in (decoder.topology, decoder.anchors, decoder.norm):
                stack.enter_context(_loaded(part))
            for sublayer in decoder.sublayers:
                _load_when_called(sublayer, stack)
        yield


def _load_when_called(module: nn.Module, until: ExitStack) -> None:
    call = ExitStack()
    before = module.register_forward_pre_hook(lambda module, _: call.enter_context(_loaded(module)))
    after = module.register_forward_hook(lambda *_: call.close(), always_call=True)
    until.callback(before.remove)
    until.callback(after.remove)


def _is_offloaded(module: nn.Module) -> bool:
    return getattr(getattr(module, "_hf_hook", None), "offload", False)


@contextmanager
def _loaded(module: nn.Module) -> Iterator[None]:
    """Keep all weights of a module in memory; calls to its parts neither load nor offload theirs."""
    parts: list[Any] = [part for part in module.modules() if _is_offloaded(part)]
    for part in parts:
        part._hf_hook.pre_forward(part)
        part._hf_hook.offload = False
    try:
        yield
    finally:
        for part in parts:
            part._hf_hook.offload = True
            part._hf_hook.post_forward(part, None)


def recomputed(
    forward: Callable[..., Any], checkpoint: Callable[..., Any], h: Any, anchors: tuple[Tensor, ...], context: Any
) -> Any:
    """Run a sublayer's `forward` under torch's `checkpoint`.

    Inputs, anchors and results are passed as separate tensors: reentrant checkpointing passes no gradient to tensors in
    a tuple.
    """
    shape: Any = None
    inputs, given = pytree.tree_flatten((h, anchors))

    def run(*inputs: Tensor) -> tuple[Any, ...]:
        nonlocal shape
        tensors, shape = pytree.tree_flatten(forward(*pytree.tree_unflatten(inputs, given), context))
        return tuple(tensors)

    tensors = checkpoint(run, *inputs)
    return pytree.tree_unflatten(tensors, shape)


class ResiduaForCausalLM(ResiduaPreTrainedModel, GenerationMixin):
    """Tokens in, logits out, and a loss if labels are given."""

    _tied_weights_keys = {"lm_head.weight": "model.decoder.embed.weight"}  # noqa: RUF012

    def __init__(self, config: ResiduaConfig) -> None:
        super().__init__(config)
        self.model = ResiduaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        # a recurrent state cannot be rolled back past a rejected token, so transformers refuses assisted decoding
        self._is_stateful = set(config.layer_types) != {"full_attention"}
        self.post_init()

    def get_input_embeddings(self) -> Any:
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.set_input_embeddings(value)

    def generate(self, inputs: Any = None, generation_config: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        """Generate like transformers, but also refuse a stateful assistant: transformers only checks the main model."""
        if self._is_stateful and getattr(generation_config, "is_assistant", False):
            raise UserError(
                "a model with linear attention cannot be an assistant model: use one with softmax attention only."
            )
        generate: Any = super().generate  # type: ignore[misc]
        return generate(inputs, generation_config, **kwargs)

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
        """Return the mask unchanged: `Past` computes the visible tokens for every kind of cache."""
        return attention_mask

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """labels [B, T] are the tokens themselves, or −100 to ignore a position; transformers shifts them.

        logits_to_keep: the number of last positions to compute logits for (0: all), or their indices.
        """
        inputs = (input_ids, attention_mask, position_ids, past_key_values, use_cache)
        outputs = self.model(*inputs, inputs_embeds, output_hidden_states, **kwargs)
        index = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden = outputs.last_hidden_state[:, index]
        logits: Any = self.lm_head(hidden.to(self.lm_head.weight.dtype))
        logits = soft_cap(logits, (self.config.residua or {}).get("logit_softcap"))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
        )
        return output.to_tuple() if return_dict is False else output
