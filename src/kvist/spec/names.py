"""Tensor names as data: one canonical name per role, its HF and GGUF spellings, and the shape the spec gives it.

Canonical names: ``embed``, ``positions``, ``final_norm``, ``head``, and ``layers.<i>.<role>`` with the roles of
``layer_tensors`` (``experts.<n>.gate`` and the like for an expert's); a bias is the role with ``.bias`` behind it.
Shapes are [rows, columns] = [out, in].
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from kvist.base.errors import WeightsError
from kvist.spec.layer_tensors import BARE, WIDE, layer_tensors
from kvist.spec.model import Attention, LayerSpec, ModelSpec
from kvist.spec.spellings import scheme_of, spelled

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
    width): the file's rows go kv head by kv head, see ``grouped_rows``. ``interleaved`` (blocks, plain rows, rotated
    rows): in each block, rotated rows follow plain ones as neighbouring pairs. ``transposed``: stored as [columns,
    rows]. ``wide``: held as float32 always.
    """

    canonical: str
    shape: tuple[int, ...]
    name: str
    optional: bool = False
    grouped: tuple[int, int, int] | None = None
    transposed: bool = False
    interleaved: tuple[int, int, int] | None = None
    wide: bool = False

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
        tensors[tensor.canonical] = tensor
        if bias:
            name, spelled_as = f"{tensor.canonical}.bias", tensor.name.removesuffix(".weight") + ".bias"
            tensors[name] = replace(tensor, canonical=name, shape=tensor.shape[:1], name=spelled_as, transposed=False)

    add(ExpectedTensor("embed", wide, f"{top.embed}.weight"))
    if spec.learned_positions is not None:
        add(ExpectedTensor("positions", (spec.learned_positions, spec.hidden_size), f"{top.positions}.weight"))
    for index, layer in enumerate(spec.layers):
        scheme = scheme_of(spec, layer, form)
        prefix, at = scheme.layer.format(index), f"layers.{index}."
        for part in layer_tensors(spec, layer, scheme):
            role = part.role
            tensor = ExpectedTensor(
                at + role,
                part.shape,
                f"{prefix}{spelled(scheme, role)}{'' if role in BARE else '.weight'}",
                grouped=_groups(layer) if role == "qkv" and scheme.grouped else None,
                transposed=scheme.transposed and len(part.shape) > 1,
                interleaved=part.interleaved,
                wide=role in WIDE,
            )
            add(tensor, part.bias)
    add(ExpectedTensor("final_norm", (spec.hidden_size,), f"{top.final_norm}.weight"), spec.norm.bias)
    add(ExpectedTensor("head", wide, f"{top.head}.weight", optional=spec.tied_embeddings))
    return tensors


def _groups(layer: LayerSpec) -> tuple[int, int, int]:
    attention = layer.attention
    assert isinstance(attention, Attention)
    return attention.num_heads, attention.num_kv_heads, attention.head_dim


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
            if not _IGNORED[form].search(name) and not _is_extra_layer(spec, _plain(name), form):
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


def _is_extra_layer(spec: ModelSpec, name: str, form: str) -> bool:
    """Whether ``name`` belongs to a layer for multi-token prediction, which follows those of the decoder."""
    prefix = scheme_of(spec, spec.layers[0], form).layer
    return any(name.startswith(prefix.format(spec.num_layers + i)) for i in range(spec.mtp_layers))


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


def row_order(tensor: ExpectedTensor) -> list[int] | None:
    """The file's row of each row of the spec's order; None where they are the same."""
    if tensor.grouped is not None:
        return grouped_rows(*tensor.grouped)
    if tensor.interleaved is None:
        return None
    blocks, plain, rotated = tensor.interleaved
    block = [*range(plain), *(plain + row for row in half_split_rows(1, rotated))]
    return [index * (plain + rotated) + row for index in range(blocks) for row in block]
