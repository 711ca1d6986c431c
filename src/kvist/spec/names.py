"""Tensor names as data: one canonical name per role, its HF and GGUF spellings, and the shape the spec gives it.

Canonical names: ``embed``, ``final_norm``, ``head``, and ``layers.<i>.<role>`` with the roles of ``LAYER_ROLES``; a
bias is the role with ``.bias`` behind it. Shapes are [rows, columns] = [out, in].
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvist.base.errors import SpecError, WeightsError
from kvist.spec.model import Attention, LayerSpec, ModelSpec

LAYER_ROLES = (
    "input_norm",
    "q",
    "k",
    "v",
    "q_norm",
    "k_norm",
    "o",
    "post_attention_norm",
    "pre_ffn_norm",
    "gate",
    "up",
    "down",
    "post_ffn_norm",
)

_COMMON_HF = {
    "input_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
# Without post norms the norm before the feed forward is called post_attention_layernorm; with them that name is taken.
_HF = {
    False: {**_COMMON_HF, "pre_ffn_norm": "post_attention_layernorm"},
    True: {
        **_COMMON_HF,
        "post_attention_norm": "post_attention_layernorm",
        "pre_ffn_norm": "pre_feedforward_layernorm",
        "post_ffn_norm": "post_feedforward_layernorm",
    },
}
_GGUF = {
    "input_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "o": "attn_output",
    "post_attention_norm": "post_attention_norm",
    "pre_ffn_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "post_ffn_norm": "post_ffw_norm",
}
_TOP = {
    "hf": {"embed": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"},
    "gguf": {"embed": "token_embd", "final_norm": "output_norm", "head": "output"},
}
# A multimodal checkpoint puts the decoder below one of these; both orders have been published.
_HF_PREFIXES = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
_IGNORED = {
    "hf": re.compile(
        r"^(model\.)?(vision_tower|vision_model|multi_modal_projector|embed_vision)\.|\.rotary_emb\.inv_freq$"
    ),
    "gguf": re.compile(r"^rope_freqs\.weight$"),
}
FORMS = ("hf", "gguf")


@dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """A tensor that the spec asks for. ``optional``: a head that is tied, and so may be absent and is not loaded."""

    canonical: str
    shape: tuple[int, ...]
    hf: str
    gguf: str
    optional: bool = False


@dataclass(frozen=True, slots=True)
class NameMatch:
    """What a file's names are: canonical to file name, and what is missing, unknown, or of another shape."""

    found: dict[str, str]
    missing: tuple[str, ...]
    extra: tuple[str, ...]
    misshaped: tuple[str, ...]

    def require(self, where: str) -> None:
        """Raise WeightsError that lists every difference (the first eight of each kind), or return."""
        parts = [
            f"{kind} ({len(names)}): {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}"
            for kind, names in (("missing", self.missing), ("extra", self.extra), ("of another shape", self.misshaped))
            if names
        ]
        if parts:
            raise WeightsError(f"{where}: tensors do not fit the model's description; " + "; ".join(parts))


def expected_tensors(spec: ModelSpec) -> dict[str, ExpectedTensor]:
    """Every tensor of ``spec`` by canonical name, in the order of the decoder. SpecError for layers that cannot run."""
    tensors: dict[str, ExpectedTensor] = {}

    def top(role: str, shape: tuple[int, ...], optional: bool = False) -> None:
        hf, gguf = _TOP["hf"][role], _TOP["gguf"][role]
        tensors[role] = ExpectedTensor(role, shape, f"{hf}.weight", f"{gguf}.weight", optional)

    top("embed", (spec.vocab_size, spec.hidden_size))
    for index, layer in enumerate(spec.layers):
        hf_names = _HF[layer.post_norms]
        for role, shape, bias in _layer_shapes(spec, layer):
            hf, gguf = f"model.layers.{index}.{hf_names[role]}", f"blk.{index}.{_GGUF[role]}"
            canonical = f"layers.{index}.{role}"
            tensors[canonical] = ExpectedTensor(canonical, shape, f"{hf}.weight", f"{gguf}.weight")
            if bias:
                name = f"{canonical}.bias"
                tensors[name] = ExpectedTensor(name, shape[:1], f"{hf}.bias", f"{gguf}.bias")
    top("final_norm", (spec.hidden_size,))
    top("head", (spec.vocab_size, spec.hidden_size), optional=spec.tied_embeddings)
    return tensors


def _layer_shapes(spec: ModelSpec, layer: LayerSpec) -> list[tuple[str, tuple[int, ...], bool]]:
    """(role, shape, has a bias) of one layer."""
    attention, width = layer.attention, layer.feed_forward.intermediate_size
    if not isinstance(attention, Attention):
        raise SpecError(f"{spec.architecture}: layers of kind {type(attention).__name__} can be planned, not loaded")
    hidden, h, g = spec.hidden_size, attention.num_heads, attention.num_kv_heads
    qkv, ffn = attention.qkv_bias, layer.feed_forward.bias
    shapes: list[tuple[str, tuple[int, ...], bool]] = [
        ("input_norm", (hidden,), False),
        ("q", (h * attention.head_dim, hidden), qkv),
        ("k", (g * attention.head_dim, hidden), qkv),
        ("v", (g * attention.v_head_dim, hidden), qkv),
    ]
    if attention.qk_norm:
        shapes += [("q_norm", (attention.head_dim,), False), ("k_norm", (attention.head_dim,), False)]
    shapes.append(("o", (hidden, h * attention.v_head_dim), attention.out_bias))
    if layer.post_norms:
        shapes.append(("post_attention_norm", (hidden,), False))
    shapes += [
        ("pre_ffn_norm", (hidden,), False),
        ("gate", (width, hidden), ffn),
        ("up", (width, hidden), ffn),
        ("down", (hidden, width), ffn),
    ]
    if layer.post_norms:
        shapes.append(("post_ffn_norm", (hidden,), False))
    return shapes


def match_names(
    spec: ModelSpec, names: Iterable[str], form: str, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> NameMatch:
    """Sort the ``names`` of a file (``form`` is ``hf`` or ``gguf``) by what ``spec`` expects.

    Shapes are compared when ``shapes`` gives them. Prefixes of multimodal checkpoints are understood; vision towers and
    rotary buffers are passed over. A tied head that is stored again is neither found nor extra.
    """
    expected = expected_tensors(spec)
    by_file_name = {getattr(tensor, form): tensor for tensor in expected.values()}
    found: dict[str, str] = {}
    extra: list[str] = []
    for name in names:
        tensor = by_file_name.get(_plain(name) if form == "hf" else name)
        if tensor is None:
            if not _IGNORED[form].search(name):
                extra.append(name)
        elif not (tensor.canonical == "head" and spec.tied_embeddings):
            found[tensor.canonical] = name
    missing = [
        f"{tensor.canonical} ({getattr(tensor, form)})"
        for tensor in expected.values()
        if tensor.canonical not in found and not tensor.optional
    ]
    misshaped = [
        f"{found[name]} is {list(shapes[found[name]])}, expected {list(expected[name].shape)}"
        for name in found
        if shapes is not None and tuple(shapes[found[name]]) != expected[name].shape
    ]
    return NameMatch(found, tuple(missing), tuple(extra), tuple(misshaped))


def _plain(name: str) -> str:
    for prefix, plain in _HF_PREFIXES:
        if name.startswith(prefix):
            return plain + name[len(prefix) :]
    return name


def half_split_rows(num_heads: int, head_dim: int) -> list[int]:
    """Source row of each row when interleaved rotary pairs (2j, 2j+1) become half-split pairs (j, j + head_dim / 2).

    GGUF files of the llama family hold q and k interleaved; ``weight[half_split_rows(H, D)]`` is the order of the spec.
    """
    half = head_dim // 2
    return [h * head_dim + 2 * (d % half) + d // half for h in range(num_heads) for d in range(head_dim)]
