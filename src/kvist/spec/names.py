"""Tensor names as data: one canonical name per role, its HF and GGUF spellings, and the shape the spec gives it.

Canonical names: ``embed``, ``positions``, ``final_norm``, ``head``, and ``layers.<i>.<role>`` with the roles of
``LAYER_ROLES``, or ``qkv`` and ``gate_up`` where a file stores them fused; a bias is the role with ``.bias`` behind it.
Shapes are [rows, columns] = [out, in].
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from kvist.base.errors import SpecError, WeightsError
from kvist.spec.model import Attention, LayerSpec, ModelSpec, Norm
from kvist.spec.spellings import Scheme, scheme_of

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

# A multimodal checkpoint puts the decoder below one of these; both orders have been published.
_HF_PREFIXES = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
_BARE = re.compile(r"^(h\.\d+|wte|wpe|ln_f)\.")  # GPT-2 as it was first published, without "transformer."
_IGNORED = {
    "hf": re.compile(
        r"^(model\.)?(vision_tower|vision_model|multi_modal_projector|embed_vision)\.|\.rotary_emb\.inv_freq$"
        r"|\.(attn|attention)\.(bias|masked_bias)$"  # stored causal masks
    ),
    "gguf": re.compile(r"^rope_(freqs|factors_long|factors_short)\.weight$"),
}
FORMS = ("hf", "gguf")


@dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """A tensor that the spec asks for, under the file's ``name``.

    ``optional``: a head that is tied, and so may be absent and is not loaded. ``grouped`` (query heads, kv heads, head
    width): the file's rows go kv head by kv head, see ``grouped_rows``. ``transposed``: stored as [columns, rows].
    """

    canonical: str
    shape: tuple[int, ...]
    name: str
    optional: bool = False
    grouped: tuple[int, int, int] | None = None
    transposed: bool = False

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in the file."""
        return self.shape[::-1] if self.transposed else self.shape


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


def expected_tensors(spec: ModelSpec, form: str = "hf") -> dict[str, ExpectedTensor]:
    """Every tensor of ``spec`` by canonical name, as files of ``form`` (``hf`` or ``gguf``) hold it, in order.

    SpecError for layers that cannot run.
    """
    tensors: dict[str, ExpectedTensor] = {}
    top = scheme_of(spec, spec.layers[0], form)
    wide = (spec.vocab_size, spec.hidden_size)

    def add(tensor: ExpectedTensor, bias: bool = False) -> None:
        tensors[tensor.canonical] = replace(tensor, name=f"{tensor.name}.weight")
        if bias:
            name = f"{tensor.canonical}.bias"
            tensors[name] = ExpectedTensor(name, tensor.shape[:1], f"{tensor.name}.bias", grouped=tensor.grouped)

    add(ExpectedTensor("embed", wide, top.embed))
    if spec.learned_positions is not None:
        add(ExpectedTensor("positions", (spec.learned_positions, spec.hidden_size), top.positions))
    for index, layer in enumerate(spec.layers):
        scheme = scheme_of(spec, layer, form)
        prefix = scheme.layer.format(index)
        for role, shape, bias in _layer_shapes(spec, layer, scheme):
            fused = {"qkv": scheme.qkv, "gate_up": scheme.gate_up}.get(role)
            add(
                ExpectedTensor(
                    f"layers.{index}.{role}",
                    shape,
                    prefix + (fused or scheme.roles[role]),
                    grouped=_groups(layer) if role == "qkv" and scheme.grouped else None,
                    transposed=scheme.transposed and len(shape) > 1,
                ),
                bias,
            )
    add(ExpectedTensor("final_norm", (spec.hidden_size,), top.final_norm), spec.norm.bias)
    add(ExpectedTensor("head", wide, top.head, optional=spec.tied_embeddings))
    return tensors


def _groups(layer: LayerSpec) -> tuple[int, int, int]:
    attention = layer.attention
    assert isinstance(attention, Attention)
    return attention.num_heads, attention.num_kv_heads, attention.head_dim


def _layer_shapes(spec: ModelSpec, layer: LayerSpec, scheme: Scheme) -> list[tuple[str, tuple[int, ...], bool]]:
    """(role, shape, has a bias) of one layer."""
    attention, width = layer.attention, layer.feed_forward.intermediate_size
    if not isinstance(attention, Attention):
        raise SpecError(f"{spec.architecture}: layers of kind {type(attention).__name__} can be planned, not loaded")
    hidden, h, g = spec.hidden_size, attention.num_heads, attention.num_kv_heads
    qkv, ffn = attention.qkv_bias, layer.feed_forward.bias
    shapes: list[tuple[str, tuple[int, ...], bool]] = []

    def norm(role: str, width: int, norm: Norm = layer.norm) -> None:
        shapes.append((role, (width,), norm.bias))

    if layer.pre_norms:
        norm("input_norm", hidden)
    rows = (h * attention.head_dim, g * attention.head_dim, g * attention.v_head_dim)
    if scheme.qkv:
        shapes.append(("qkv", (sum(rows), hidden), qkv))
    else:
        shapes += [(role, (count, hidden), qkv) for role, count in zip(("q", "k", "v"), rows, strict=True)]
    if attention.qk_norm:
        whole = attention.qk_norm_whole
        norm("q_norm", rows[0] if whole else attention.head_dim)
        norm("k_norm", rows[1] if whole else attention.head_dim)
    shapes.append(("o", (hidden, h * attention.v_head_dim), attention.out_bias))
    if layer.post_norms:
        norm("post_attention_norm", hidden)
    if layer.pre_norms and not layer.shared_norm:
        norm("pre_ffn_norm", hidden)
    if layer.feed_forward.gated and scheme.gate_up:
        shapes.append(("gate_up", (2 * width, hidden), ffn))
    else:
        shapes += [(role, (width, hidden), ffn) for role in (("gate", "up") if layer.feed_forward.gated else ("up",))]
    shapes.append(("down", (hidden, width), ffn))
    if layer.post_norms:
        norm("post_ffn_norm", hidden)
    return shapes


def match_names(
    spec: ModelSpec, names: Iterable[str], form: str, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> NameMatch:
    """Sort the ``names`` of a file (``form`` is ``hf`` or ``gguf``) by what ``spec`` expects.

    Shapes are compared when ``shapes`` gives them. Prefixes of multimodal checkpoints are understood; vision towers and
    rotary buffers are passed over. A tied head that is stored again is neither found nor extra.
    """
    expected = expected_tensors(spec, form)
    by_file_name = {tensor.name: tensor for tensor in expected.values()}
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
        f"{tensor.canonical} ({tensor.name})"
        for tensor in expected.values()
        if tensor.canonical not in found and not tensor.optional
    ]
    misshaped = [
        f"{found[name]} is {list(shapes[found[name]])}, expected {list(expected[name].stored_shape)}"
        for name in found
        if shapes is not None and tuple(shapes[found[name]]) != expected[name].stored_shape
    ]
    return NameMatch(found, tuple(missing), tuple(extra), tuple(misshaped))


def _plain(name: str) -> str:
    for prefix, plain in _HF_PREFIXES:
        if name.startswith(prefix):
            return plain + name[len(prefix) :]
    return f"transformer.{name}" if _BARE.match(name) else name


def half_split_rows(num_heads: int, head_dim: int) -> list[int]:
    """Source row of each row when interleaved rotary pairs (2j, 2j+1) become half-split pairs (j, j + head_dim / 2).

    GGUF files of the llama family hold q and k interleaved; ``weight[half_split_rows(H, D)]`` is the order of the spec.
    """
    half = head_dim // 2
    return [h * head_dim + 2 * (d % half) + d // half for h in range(num_heads) for d in range(head_dim)]


def grouped_rows(num_heads: int, num_kv_heads: int, head_dim: int) -> list[int]:
    """Source row of each row when rows that go kv head by kv head become all queries, all keys, all values.

    The file holds, for each kv head, the queries of its group, then its key, then its value.
    """
    per_group = num_heads // num_kv_heads
    heads = [g * (per_group + 2) + q for g in range(num_kv_heads) for q in range(per_group)]
    for part in (per_group, per_group + 1):
        heads += [g * (per_group + 2) + part for g in range(num_kv_heads)]
    return [head * head_dim + d for head in heads for d in range(head_dim)]
