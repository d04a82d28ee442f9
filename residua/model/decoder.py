"""The model: embed → (sublayer, junction)* → norm → head."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from residua import ops
from residua.config import choices
from residua.config.model import ModelConfig
from residua.errors import UserError
from residua.model.anchor_kinds import build_source
from residua.model.anchor_sharing import find_sharing
from residua.model.anchor_source import AnchorSource
from residua.model.anchors import LayerPlace
from residua.model.attention import SoftmaxAttention, head_shape, layer_place
from residua.model.body import Body, Sublayer, reset
from residua.model.cache import BorrowedCache, Cache, KeyValueCache, Now, SublayerCache
from residua.model.context import (
    Context,
    check_inputs,
    for_rows,
    number_documents,
    one_read,
)
from residua.model.ffn import build_ffn
from residua.model.latent_attention import LatentAttention
from residua.model.linear_attention import GatedDeltaNet, KimiDeltaAttention
from residua.model.moe import MoE, Routing
from residua.model.norm import NoNorm, Norm, build_norm
from residua.model.projection import Embedding
from residua.model.rope import rotary_table
from residua.model.taps import tap
from residua.model.topology import Topology, build_topology
from residua.ops._runtime.numeric import begins, soft_cap, working_dtype


class Places(Embedding):
    """Learned positions: x_t + P_t, t the token's position in its document. P [places, C] is normal with `std`."""

    def check(self, tokens: int) -> None:
        """Refuse sequences with more tokens than places."""
        if tokens > len(self.weight):
            raise UserError(f"the model has learned_positions = {len(self.weight)} but got {tokens} tokens: use fewer.")

    def forward(  # type: ignore[override]
        self, x: Tensor, segments: Tensor | None = None, now: Now | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Add the positions to x [B, T, C]; the other arguments are those of `Decoder._run`."""
        if positions is not None:
            raise UserError(
                "learned_positions count the tokens of a document, which is not possible where ranks divide sequences: "
                "divide the model in another way."
            )
        self.check(x.shape[1])
        places = torch.arange(x.shape[1], device=x.device)
        if now is not None:
            places = now.positions
        elif segments is not None:
            places = places - (places * begins(segments, segments)).cummax(1).values
        return x + embedding(places, self.weight)


class Decoder(nn.Module):
    """A decoder-only language model: tokens [B, T] in, logits [B, T, V] out.

    Sublayers alternate attention and feed-forward. Between them, the topology turns the output of one into the input of
    the next.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        parts: dict[str, Any] = dict(build_parts(config))
        self.embed: Embedding = parts["embed"]
        self.places: Places | None = parts.get("places")
        self.topology: Topology = parts["topology"]
        self.anchors: AnchorSource = parts["anchors"]
        self.sublayers = nn.ModuleList(parts[f"sublayers.{j}"] for j in range(2 * config.layers))
        self.order = [2 * layer + part for layer in config.executed for part in (0, 1)]
        self.norm: Norm = parts["norm"]
        self.unembed: Embedding | None = parts.get("unembed")
        if config.reader_eps == "sum":
            self._scale_eps()

    def _scale_eps(self) -> None:
        """Set the eps of each reader's norm so that it normalises c times the sum exactly like the sum."""
        norms = [*(sublayer.norm for sublayer in self.executions), self.norm]
        factors = self.topology.initialization().factors(self.config.sublayers)
        for norm, factor in zip(norms, factors, strict=True):
            if norm.eps is not None:
                norm.eps *= factor**2

    @property
    def executions(self) -> list[Sublayer]:
        """The sublayers in execution order."""
        return [cast(Sublayer, self.sublayers[j]) for j in self.order]

    def reset_parameters(self) -> None:
        """Initialise every module in place, for a model built on the meta device that now has memory."""
        for part in self.children():
            reset(part)

    @property
    def head_weight(self) -> Tensor:
        """[V, C]: the embedding's matrix when tied."""
        return self.embed.weight if self.unembed is None else self.unembed.weight

    @property
    def token_readers(self) -> list[str]:
        """The settings whose parts look up token ids."""
        topology, anchors = self.config.topology, self.config.anchors
        parts = (("topology", topology, self.topology.reads_tokens), ("anchors", anchors, anchors.reads_tokens))
        return [f"model.{part}.kind = {choice.kind!r}" for part, choice, reads in parts if reads]

    def ids_of(self, tokens: Tensor) -> Tensor | None:
        """`Context.tokens` for these tokens; None if no part reads them."""
        return tokens if self.token_readers else None

    def new_cache(self, batch: int, capacity: int, dtype: torch.dtype | None = None) -> Cache:
        """An empty cache for `batch` sequences of up to `capacity` tokens, by default in the embedding's dtype."""
        if self.places is not None:
            self.places.check(capacity)
        like = self.embed.weight.new_empty(0, dtype=dtype)
        borrowed, caches = self.config.borrowed, list[SublayerCache | None]()
        for k, sublayer in enumerate(self.executions):
            if k % 2 == 0 and k // 2 in borrowed:
                lender, taken = borrowed[k // 2]
                caches.append(BorrowedCache(cast(KeyValueCache, caches[2 * lender]), taken))
            else:
                caches.append(sublayer.body.new_cache(batch, capacity, like))
        return Cache(caches, batch, capacity, like.device)

    def hidden(
        self, tokens: Tensor, segments: Tensor | None = None, cache: Cache | None = None, counts: Tensor | None = None
    ) -> Tensor:
        """The final normalised state [B, T, C]. Mixers do not cross documents, which are runs of equal ids in segments
        [B, T].

        Instead of tokens [B, T], you may pass vectors [B, T, C], as returned by `embed`. With a cache, the tokens
        follow the cached ones and are added to them; `counts` [B] is the number of real tokens per row, and the rest is
        padding on the right. A sequence may be split over several calls; a single sequence is added to every row. A
        cache continues one document per row, so it cannot be combined with segments.
        """
        return self._run(tokens, number_documents(segments), cache, counts)[0]

    def _run(
        self,
        tokens: Tensor,
        segments: Tensor | None,
        cache: Cache | None = None,
        counts: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, list[Routing]]:
        """`hidden`, and the routing of each mixture of experts."""
        check_inputs(tokens, segments, cache, self.config.width, self.token_readers)
        now = None if cache is None else cache.now(tokens.shape[1], counts)
        if now is not None:
            tokens = for_rows(tokens, now.positions.shape[0])
        x = self._embedded(tokens, segments, now, positions)
        context = self._context(self._rotary(tokens, now, positions), segments, now, positions)
        caches = None if cache is None else cache.sublayers
        sharing = find_sharing(self.config, self.anchors, self.sublayers)
        context = context._replace(caches=caches, sharing=sharing, tokens=self.ids_of(tokens))
        h, routed = self._pass(x, context)
        if cache is not None:
            cache.advance(tokens.shape[1], counts)
        return h, routed

    def _pass(self, x: Tensor, context: Context) -> tuple[Tensor, list[Routing]]:
        """The forward pass from the embedding; returns the final normed state and the routing."""
        routed: list[Routing] = []
        ids = context.ids_for(self.topology)
        h, state = self.topology.open(x, *ids)
        anchors = self.anchors.open(x, context)
        for k, sublayer in enumerate(self.executions):
            tap(f"sublayer.{k}.input", one_read(h))
            y, anchors, *routing = sublayer(h, anchors, context.at(k))
            tap(f"sublayer.{k}.output", y)
            h, state = self.topology.step(k, y, state, *ids)
            routed += routing
        tap("final.input", h := one_read(h))
        return self.norm(h), routed

    def logits(self, h: Tensor) -> Tensor:
        """[..., V] from final states [..., C]."""
        return soft_cap(linear(h, self.head_weight.to(h.dtype)), self.config.logit_softcap)

    def forward(self, tokens: Tensor, segments: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """The logits [B, T, V]; the arguments are those of `hidden`."""
        return self.logits(self.hidden(tokens, segments, cache))

    def losses(
        self, tokens: Tensor, targets: Tensor, z_loss: float = 0.0, segments: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The cross-entropy alone (nats per target, −100 ignored) and the z-term z_loss · mean(lse²), separately."""
        h, cap = self.hidden(tokens, segments), self.config.logit_softcap
        return ops.linear_cross_entropy(h, self.head_weight, targets, z_loss=z_loss, softcap=cap)

    def routed_losses(
        self,
        tokens: Tensor,
        targets: Tensor,
        z_loss: float = 0.0,
        segments: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Routing | None]:
        """`losses` for joint minimisation, and the routing of all mixtures of experts, stacked by layer, or None.

        Only the gradient of their sum is correct, not that of either alone (`ops.training_cross_entropy`).
        `positions` [T] are the positions of the tokens in their sequence, if they are not 0, 1, 2 and so on. Each id in
        `segments` must be a single run in its row, as a `Loader` returns them: training does not renumber them.
        """
        h, routed = self._run(tokens, segments, positions=positions)
        cross_entropy, z = self.training_losses(h, targets, z_loss)
        return cross_entropy, z, Routing.stack(routed) if routed else None

    def training_losses(self, h: Tensor, targets: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
        """`losses` for joint minimisation, from final states."""
        cap = self.config.logit_softcap
        return ops.training_cross_entropy(h, self.head_weight, targets, z_loss=z_loss, softcap=cap)

    def loss(self, tokens: Tensor, targets: Tensor, z_loss: float = 0.0, segments: Tensor | None = None) -> Tensor:
        """The training loss: cross-entropy plus the z-term; with z_loss = 0, the pure cross-entropy."""
        cross_entropy, z, _ = self.routed_losses(tokens, targets, z_loss, number_documents(segments))
        return cross_entropy + z

    def _embedded(
        self, tokens: Tensor, segments: Tensor | None = None, now: Now | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Embed tokens; under autocast in low precision, because memory traffic limits the depth operators."""
        x: Tensor = tokens if tokens.is_floating_point() else self.embed(tokens)
        if self.places is not None:
            x = self.places(x, segments, now, positions)
        return x.to(working_dtype(x))

    def _context(
        self,
        rotary: tuple[Tensor, ...] | None,
        segments: Tensor | None,
        now: Now | None = None,
        positions: Tensor | None = None,
    ) -> Context:
        """The context shared by all sublayers; override it to let them attend across ranks."""
        return Context(rotary, segments, now)

    def _rotary(
        self, tokens: Tensor, now: Now | None = None, positions: Tensor | None = None
    ) -> tuple[Tensor, ...] | None:
        softmax = self.config.softmax
        mixer = self.config.latent if softmax is None else softmax  # torch 2.11 cannot trace a config's truth value
        turned = 0 if mixer is None else mixer.turned(self.config.width)
        if mixer is None or not turned:
            return None
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device) if now is None else now.positions
        whole = turned if mixer.full is None or mixer.full.head_dim is None else mixer.full.head_dim
        table: tuple[Tensor, ...] = rotary_table(positions, whole, mixer.rope_theta, mixer.rope_scaling)
        if mixer.local_rope_theta is not None:
            table = *table, *rotary_table(positions, turned, mixer.local_rope_theta)
        if mixer.query_growth is not None:
            table = *table, positions
        if mixer.unturned_layers is not None:
            table = *table, torch.ones_like(table[0]), torch.zeros_like(table[1])
        return table


def build(config: ModelConfig) -> Decoder:
    """Build and initialise the model that a configuration describes."""
    if not isinstance(config, ModelConfig):
        raise TypeError(f"build takes a ModelConfig, not {type(config).__name__}: ModelConfig.preset(NAME) makes one.")
    return Decoder(config)


def build_parts(config: ModelConfig) -> Iterator[tuple[str, nn.Module]]:
    """The initialised parts of a decoder by name, in the order in which they draw random numbers.

    Each part is released before the next is built, except that the two bodies of a layer are built together.
    """
    yield "embed", Embedding(config.vocab_size, config.width, std=config.init.std, scale=config.embed_scale)
    if config.learned_positions is not None:
        yield "places", Places(config.learned_positions, config.width, std=config.init.std)
    topology = build_topology(config.topology, config.sublayers, config.width)
    gain = topology.initialization().output_gain
    yield "topology", topology
    del topology
    yield "anchors", build_anchor_source(config)
    for layer in range(config.layers):
        yield from _layer_parts(config, layer, output_std(config) * gain)
    yield "norm", NoNorm() if config.topology.norms_inputs else build_norm(config.norm, config.width)
    if not isinstance(config.head, choices.TiedHead):
        std = {"normal": config.init.std, "zero": 0.0}[config.head.init]
        yield "unembed", Embedding(config.vocab_size, config.width, std=std)


def _layer_parts(config: ModelConfig, layer: int, output_std: float) -> Iterator[tuple[str, nn.Module]]:
    """The two sublayers of one transformer layer, attention and feed-forward, with their norms placed as configured."""
    ffn, width, std = config.ffn.at(layer), config.width, config.init.std
    bodies: list[Body] = [build_mixer(config, layer, output_std=output_std)]
    if isinstance(ffn, choices.MoE):
        bodies.append(MoE(ffn, layer, width, std=std, output_std=output_std))
    else:
        bodies.append(build_ffn(ffn, width, std=std, output_std=output_std))
    unnormed = config.placement == "output" or config.topology.norms_inputs
    for k, body in enumerate(bodies, 2 * layer):
        before = NoNorm() if unnormed else build_norm(config.norm, width)
        after = None if config.placement == "input" else build_norm(config.norm, width)
        yield f"sublayers.{k}", Sublayer(before, body, after)


def place_of(config: ModelConfig, mixer: choices.SoftmaxAttention, layer: int) -> LayerPlace:
    """The place of a softmax layer, and the heads that it projects itself."""
    layers = config.softmax_layers
    taken = config.anchors.taken(layers.index(layer))
    std, vocabulary = config.init.std, config.vocab_size
    return layer_place(mixer, layer, layers, config.width, std=std, vocabulary=vocabulary, taken=taken)


def build_mixer(config: ModelConfig, layer: int, *, output_std: float) -> Body:
    """Build the sequence mixer of one layer."""
    mixer, width, std = config.attention.at(layer), config.width, config.init.std
    if isinstance(mixer, choices.SoftmaxAttention):
        place = place_of(config, mixer, layer)
        return SoftmaxAttention(mixer, config.anchors, layer, place, output_std=output_std)
    if isinstance(mixer, choices.LatentAttention):
        return LatentAttention(mixer, layer, width, std=std, output_std=output_std)
    if isinstance(mixer, choices.KimiDelta):
        return KimiDeltaAttention(mixer, width, std=std, output_std=output_std)
    return GatedDeltaNet(mixer, width, std=std, output_std=output_std)


def build_anchor_source(config: ModelConfig) -> AnchorSource:
    """Build the module that makes the first anchors."""
    shape = None if config.softmax is None else head_shape(config.softmax, config.width)
    return build_source(config.anchors, shape, config.width, std=config.init.std)


def output_std(config: ModelConfig) -> float:
    """Initial std of each sublayer's last projection."""
    factor = {"normal": 1.0, "scaled": 1 / math.sqrt(config.sublayers), "zero": 0.0}[config.init.output]
    return config.init.std * factor
