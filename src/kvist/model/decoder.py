"""The one decoder: walks the LayerSpecs once and lists their operations; a variant is data, not a branch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kvist.base.errors import KernelError, SpecError
from kvist.cache.layout import Layout
from kvist.cache.pool import Pool
from kvist.cache.rows import KeyValue, Latent
from kvist.kernels.ops import (
    Append,
    Attend,
    Backend,
    Embed,
    Executor,
    LayerStore,
    Linear,
    NormAdd,
    Normalise,
    NormWeight,
    Op,
    Step,
)
from kvist.model.buffers import Buffers
from kvist.model.experts import choose_experts
from kvist.model.latent import attend_latents, expand_from
from kvist.model.weights import LayerWeights, ModelWeights
from kvist.spec.model import Attention, LatentAttention, LayerSpec, MixtureOfExperts, ModelSpec, Rope
from kvist.spec.rope import attention_factor, inverse_frequencies


def rope_table(rope: Rope, positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin float32 [positions, rotary_dim/2], functions of the absolute position alone.

    The angle is the float32 product of position and frequency, as in the implementations that models are trained with;
    its cosine is exact and rounded once.
    """
    frequencies = np.asarray(inverse_frequencies(rope), dtype=np.float32)
    angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies[None, :]
    factor = attention_factor(rope)
    exact = angles.astype(np.float64)
    cos, sin = np.cos(exact) * factor, np.sin(exact) * factor
    return torch.from_numpy(cos.astype(np.float32)), torch.from_numpy(sin.astype(np.float32))


def layer_store(pool: Pool, layer: int) -> LayerStore:
    """The pool's bytes of one layer, as the kernels read them."""
    group = pool.group_of(layer)
    layout: Layout = group.layout
    match layout.rows:
        case KeyValue(heads, k_width, v_width):
            pass
        case Latent(rank, rotary):
            heads, k_width, v_width = 1, rank + rotary, rank
        case other:
            raise SpecError(f"layer {layer} leaves {other} in the cache: keys and values, and latents, can run")
    return LayerStore(
        data=pool.data(layer),
        dtype=layout.dtype,
        block_size=layout.block_size,
        num_kv_heads=heads,
        head_dim=k_width,
        v_head_dim=v_width,
        group=group.index,
        value_in_key=isinstance(layout.rows, Latent),
    )


class Decoder:
    """A model ready to run: its operations, compiled by a backend, over its weights, its buffers and the pool."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        backend: Backend,
        pool: Pool,
        *,
        max_positions: int,
        max_tokens: int = 512,
        max_rows: int = 16,
    ) -> None:
        """``max_positions``: rows of the rotation tables; ``max_tokens``: T of one step; ``max_rows``: logits at once.

        Raises KernelError, naming the operation, when the backend refuses one.
        """
        self.spec, self.backend, self.pool = spec, backend, pool
        self.max_tokens, self.max_rows, self.max_positions = max_tokens, max_rows, max_positions
        kv_dtype = pool.groups[0].layout.dtype
        self.buffers = Buffers(spec, weights.dtype, kv_dtype, max_tokens, max_rows)
        self._tables: dict[Rope, tuple[Tensor, Tensor]] = {}
        body = self._body(weights, expand=False)
        head = Linear(
            "head",
            self.buffers.x,
            weights.head,
            self.buffers.logits,
            norm=weights.final_norm,
            wanted=True,
            softcap=spec.logit_softcap,
            scale=spec.logit_scale,
        )
        self.ops = (*body, head)
        self.body = backend.compile(body)
        self.head = backend.compile([head])
        # A second body for steps in which every request brings many tokens, where weights were loaded for it.
        self.expanded: Executor | None = None
        if any(layer.latent is not None and layer.latent.keys for layer in weights.layers):
            self.expanded = backend.compile(self._body(weights, expand=True))
        latents = [layer.attention for layer in spec.layers if isinstance(layer.attention, LatentAttention)]
        self.expand_from = max((expand_from(a) for a in latents), default=0)

    def forward(self, step: Step) -> Tensor:
        """Logits float32 [R, vocab] of ``step.rows``; K and V of the step's tokens are stored on the way.

        A view of a buffer that the next call overwrites when R <= ``max_rows``, else a tensor of its own. Raises
        KernelError for a step of more than ``max_tokens`` tokens.
        """
        if len(step.tokens) > self.max_tokens:
            raise KernelError(f"a step of {len(step.tokens)} tokens: buffers were made for {self.max_tokens}")
        self._chosen(step).run(step)
        return self.logits(step)

    def _chosen(self, step: Step) -> Executor:
        """The body that runs ``step``: the expanding one, if there is one and every request brings enough tokens."""
        if self.expanded is None or len(step.tokens) < self.expand_from:
            return self.body
        return self.expanded if int(step.starts.diff().min()) >= self.expand_from else self.body

    def logits(self, step: Step) -> Tensor:
        """Logits of ``step.rows`` from the residual stream that the last ``forward`` left."""
        wanted = len(step.rows)
        if wanted <= self.max_rows:
            if wanted:
                self.head.run(step)
            return self.buffers.logits[:wanted]
        out = torch.empty(wanted, self.spec.vocab_size)
        for start in range(0, wanted, self.max_rows):
            part = step.rows[start : start + self.max_rows]
            self.head.run(Step(step.tokens, step.positions, step.starts, step.tables, part))
            out[start : start + len(part)] = self.buffers.logits[: len(part)]
        return out

    def _body(self, weights: ModelWeights, expand: bool) -> list[Op]:
        """Every operation but the head, latents absorbed or expanded."""
        scale = self.spec.embedding_scale
        ops: list[Op] = [Embed("embed", weights.embed, scale, self.buffers.x, weights.positions)]
        for index, (layer, layer_weights) in enumerate(zip(self.spec.layers, weights.layers, strict=True)):
            ops += self._layer(index, layer, layer_weights, expand)
        return ops

    def _layer(self, index: int, layer: LayerSpec, w: LayerWeights, expand: bool) -> list[Op]:
        at, a = f"layer {index} ", layer.attention
        store = layer_store(self.pool, index)
        table = self._table(a.rope) if a.rope is not None else (None, None)
        values: Tensor
        if isinstance(a, LatentAttention):
            if w.latent is None:
                raise SpecError(f"{at}has latent attention, but its weights were loaded without")
            cos, sin = table
            project, attend, values = attend_latents(at, a, w, w.latent, self.buffers, store, cos, sin, expand)
        else:
            project, attend, values = self._attend(at, a, w, store, table)
        o = self._join(layer, Linear(at + "o", values, w.o, self.buffers.x, bias=w.o_bias), w.post_attention_norm)
        up, down = self._feed_forward(at, layer, w)
        # Parallel branches: the feed forward reads the stream before attention has added to it.
        middle: list[Op] = [*up, *attend, *o] if layer.parallel else [*attend, *o, *up]
        return [*project, *middle, *down]

    def _attend(
        self, at: str, a: Attention, w: LayerWeights, store: LayerStore, table: tuple[Tensor | None, Tensor | None]
    ) -> tuple[list[Op], list[Op], Tensor]:
        """(projections of the stream, what follows them, values [T, H * Dv])."""
        b = self.buffers
        qkv = b.qkv[:, : w.qkv.n]
        q = b.q[:, : a.num_heads * a.head_dim]
        attended = b.attended[:, : a.num_heads * a.v_head_dim]
        # A whole norm works on all heads at once, before the append; one for each head is the append's own.
        q_norm, k_norm = (None, None) if a.qk_norm_whole else (w.q_norm, w.k_norm)
        project: list[Op] = [Linear(at + "qkv", b.x, w.qkv, qkv, norm=w.input_norm, bias=w.qkv_bias)]
        if a.qk_norm_whole and w.q_norm is not None and w.k_norm is not None:
            queries, keys = qkv[:, : q.shape[1]], qkv[:, q.shape[1] :][:, : a.num_kv_heads * a.head_dim]
            project.append(Normalise(at + "q norm", queries, w.q_norm, queries))
            project.append(Normalise(at + "k norm", keys, w.k_norm, keys))
        attend: list[Op] = [
            Append(at + "append", qkv, q, store, a.num_heads, a.scale, *table, q_norm, k_norm),
            Attend(at + "attend", q, attended, store, a.num_heads, a.window, a.sinks, a.softcap),
        ]
        return project, attend, attended

    def _feed_forward(self, at: str, layer: LayerSpec, w: LayerWeights) -> tuple[list[Op], list[Op]]:
        """(what reads the stream, what adds to it): one feed forward, or chosen ones and perhaps a shared one."""
        feed, b = layer.feed_forward, self.buffers
        up: list[Op] = []
        down: list[Op] = []
        if isinstance(feed, MixtureOfExperts):
            if w.experts is None or layer.post_norms:
                raise SpecError(f"{at}has experts whose weights were not loaded, or with a norm behind them: not known")
            up, down = choose_experts(at, feed, w.experts, w.pre_ffn_norm, b, layer.residual_scale)
            width, gated, at = feed.shared_size, True, at + "shared "
        else:
            width, gated = feed.intermediate_size, feed.gated
        if w.gate_up is not None and w.down is not None:
            out = b.gated[:, :width]
            up.append(
                Linear(
                    at + ("gate up" if gated else "up"),
                    b.x,
                    w.gate_up,
                    out,
                    epilogue="glu" if gated else "act",
                    norm=w.pre_ffn_norm,
                    bias=w.gate_up_bias,
                    activation=feed.activation,
                )
            )
            down += self._join(layer, Linear(at + "down", out, w.down, b.x, bias=w.down_bias), w.post_ffn_norm)
        return up, down

    def _join(self, layer: LayerSpec, branch: Linear, post: NormWeight | None) -> list[Op]:
        """The end of a branch: added to the stream, by way of its norm where there is one."""
        if post is None:
            return [replace(branch, epilogue="add", scale=layer.residual_scale)]
        if layer.residual_scale != 1.0:
            raise SpecError(f"{branch.name}: a scaled branch behind a norm is not known: the norm undoes the scale")
        return [
            replace(branch, out=self.buffers.branch),
            NormAdd(f"{branch.name} norm", self.buffers.branch, post, branch.out),
        ]

    def _table(self, rope: Rope) -> tuple[Tensor, Tensor]:
        if rope not in self._tables:
            self._tables[rope] = rope_table(rope, self.max_positions)
        return self._tables[rope]
