"""The one decoder: walks the LayerSpecs once and lists their operations; a variant is data, not a branch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kvist.base.dtypes import BFLOAT16, FLOAT32, DType
from kvist.base.errors import KernelError, SpecError
from kvist.cache.layout import Layout
from kvist.cache.pool import Pool
from kvist.cache.rows import KeyValue
from kvist.kernels.ops import (
    Append,
    Attend,
    Backend,
    Embed,
    LayerStore,
    Linear,
    NormAdd,
    Normalise,
    NormWeight,
    Op,
    Step,
    torch_dtype,
)
from kvist.model.weights import LayerWeights, ModelWeights
from kvist.spec.model import Attention, LayerSpec, ModelSpec, Rope
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
    if not isinstance(layout.rows, KeyValue):
        raise SpecError(f"layer {layer} leaves {layout.rows} in the cache: only keys and values can run")
    rows = layout.rows
    return LayerStore(
        data=pool.data(layer),
        dtype=layout.dtype,
        block_size=layout.block_size,
        num_kv_heads=rows.num_kv_heads,
        head_dim=rows.head_dim,
        v_head_dim=rows.v_head_dim,
        group=group.index,
    )


class Buffers:
    """The working memory of a step: the residual stream, one branch, projections, logits. Rows are tokens."""

    def __init__(self, spec: ModelSpec, dtype: DType, kv_dtype: DType, tokens: int, rows: int) -> None:
        """Allocate for at most ``tokens`` tokens and ``rows`` rows of logits a step."""
        layers = [(layer.attention, layer.feed_forward) for layer in spec.layers]
        kinds = [attention for attention, _ in layers if isinstance(attention, Attention)]
        act, q_type = torch_dtype(dtype), torch_dtype(BFLOAT16 if kv_dtype == BFLOAT16 else FLOAT32)
        qkv = max((a.num_heads + a.num_kv_heads) * a.head_dim + a.num_kv_heads * a.v_head_dim for a in kinds)
        self.x = torch.empty(tokens, spec.hidden_size)
        self.branch = torch.empty(tokens, spec.hidden_size)
        self.qkv = torch.empty(tokens, qkv)
        self.q = torch.empty(tokens, max(a.num_heads * a.head_dim for a in kinds), dtype=q_type)
        self.attended = torch.empty(tokens, max(a.num_heads * a.v_head_dim for a in kinds), dtype=act)
        self.gated = torch.empty(tokens, max(f.intermediate_size for _, f in layers), dtype=act)
        self.logits = torch.empty(rows, spec.vocab_size)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(t.numel() * t.element_size() for t in vars(self).values())


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
        ops: list[Op] = [Embed("embed", weights.embed, spec.embedding_scale, self.buffers.x, weights.positions)]
        for index, (layer, layer_weights) in enumerate(zip(spec.layers, weights.layers, strict=True)):
            ops += self._layer(index, layer, layer_weights)
        ops.append(
            Linear(
                "head",
                self.buffers.x,
                weights.head,
                self.buffers.logits,
                norm=weights.final_norm,
                wanted=True,
                softcap=spec.logit_softcap,
                scale=spec.logit_scale,
            )
        )
        self.ops = tuple(ops)
        self.body = backend.compile(ops[:-1])
        self.head = backend.compile(ops[-1:])

    def forward(self, step: Step) -> Tensor:
        """Logits float32 [R, vocab] of ``step.rows``; K and V of the step's tokens are stored on the way.

        A view of a buffer that the next call overwrites when R <= ``max_rows``, else a tensor of its own. Raises
        KernelError for a step of more than ``max_tokens`` tokens.
        """
        if len(step.tokens) > self.max_tokens:
            raise KernelError(f"a step of {len(step.tokens)} tokens: buffers were made for {self.max_tokens}")
        self.body.run(step)
        return self.logits(step)

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

    def _layer(self, index: int, layer: LayerSpec, w: LayerWeights) -> list[Op]:
        a, b, at = layer.attention, self.buffers, f"layer {index} "
        assert isinstance(a, Attention)
        qkv = b.qkv[:, : w.qkv.n]
        q = b.q[:, : a.num_heads * a.head_dim]
        attended = b.attended[:, : a.num_heads * a.v_head_dim]
        gated = b.gated[:, : layer.feed_forward.intermediate_size]
        store = layer_store(self.pool, index)
        cos, sin = self._table(a.rope) if a.rope is not None else (None, None)
        feed_forward = layer.feed_forward
        # A whole norm works on all heads at once, before the append; one for each head is the append's own.
        q_norm, k_norm = (None, None) if a.qk_norm_whole else (w.q_norm, w.k_norm)
        project: list[Op] = [Linear(at + "qkv", b.x, w.qkv, qkv, norm=w.input_norm, bias=w.qkv_bias)]
        if a.qk_norm_whole and w.q_norm is not None and w.k_norm is not None:
            queries, keys = qkv[:, : q.shape[1]], qkv[:, q.shape[1] :][:, : a.num_kv_heads * a.head_dim]
            project.append(Normalise(at + "q norm", queries, w.q_norm, queries))
            project.append(Normalise(at + "k norm", keys, w.k_norm, keys))
        up = Linear(
            at + ("gate up" if feed_forward.gated else "up"),
            b.x,
            w.gate_up,
            gated,
            epilogue="glu" if feed_forward.gated else "act",
            norm=w.pre_ffn_norm,
            bias=w.gate_up_bias,
            activation=feed_forward.activation,
        )
        attend: list[Op] = [
            Append(at + "append", qkv, q, store, a.num_heads, a.scale, cos, sin, q_norm, k_norm),
            Attend(at + "attend", q, attended, store, a.num_heads, a.window, a.sinks, a.softcap),
        ]
        o = self._join(layer, Linear(at + "o", attended, w.o, b.x, bias=w.o_bias), w.post_attention_norm)
        down = self._join(layer, Linear(at + "down", gated, w.down, b.x, bias=w.down_bias), w.post_ffn_norm)
        # Parallel branches: the feed forward reads the stream before attention has added to it.
        middle: list[Op] = [up, *attend, *o] if layer.parallel else [*attend, *o, up]
        return [*project, *middle, *down]

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
