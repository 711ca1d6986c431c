"""Multi-head latent attention to study: its functions one by one, and what becomes of a model that gets latents late.

``fit`` takes a trained model with keys and values, finds the latents of a given rank that explain them best on sample
text (principal components of [K, V], before rotation: rope does not pass through a latent), and says what is lost on
text that was not used. It is the best that can be done without training, and it shows why latents are trained: the keys
and values of a model that never had to share a latent use nearly all of their directions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from kvist.base.errors import SpecError, TooLong, UsageError
from kvist.cache.table import Table
from kvist.compose import LLM, load
from kvist.kernels.latent import absorb, attend_absorbed, compress, expand, expand_output
from kvist.kernels.ops import Linear, Step
from kvist.kernels.reference_parts import rotate
from kvist.learn.book import prose
from kvist.model.decoder import Decoder, rope_table
from kvist.spec.model import Attention

__all__ = [
    "Effect",
    "FitReport",
    "LatentFit",
    "absorb",
    "attend_absorbed",
    "compress",
    "expand",
    "expand_output",
    "fit",
    "fit_rows",
]

SAMPLE, HELD_OUT = 2048, 512  # tokens to fit on, and to judge by
JUDGED = 64  # positions whose next-token probabilities are compared


@dataclass(frozen=True, slots=True, eq=False)
class LatentFit:
    """A latent of ``rank`` numbers in place of one layer's keys and values, ``width`` numbers a token.

    c = down @ (kv - mean) and kv is about mean + up @ c, with ``mean`` [width], ``up`` [width, rank], ``down`` [rank,
    width]. Errors are relative norms over rows that were not fitted to, of what differs from the mean: of both, of keys
    and of values; ``rotated_error`` is that of keys and values fitted behind the rotation, None where there is none.
    """

    layer: int
    rank: int
    width: int
    error: float
    key_error: float
    value_error: float
    rotated_error: float | None
    mean: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class Effect:
    """The model with latents of ``rank`` in all fitted layers: mean KL (nats) of its next-token probabilities to what
    they were, and the share of positions whose likeliest token stayed.
    """

    rank: int
    kl: float
    same_token: float


@dataclass(frozen=True, slots=True)
class FitReport:
    """Every layer's fits and what all of them together do to the model. ``str`` of it is a table."""

    model: str
    layers: tuple[int, ...]
    fits: tuple[LatentFit, ...]
    effects: tuple[Effect, ...]

    def __str__(self) -> str:
        """One line for each rank, layers averaged."""
        width = self.fits[0].width
        lines = [
            f"{self.model}, {len(self.layers)} layers, {width} numbers per token and layer as keys and values",
            f"{'rank':>6} {'of width':>9} {'error':>8} {'keys':>8} {'values':>8} {'rotated':>8} {'KL':>9} {'same':>6}",
        ]
        for effect in self.effects:
            fits = [fit for fit in self.fits if fit.rank == effect.rank]
            rotated = [fit.rotated_error for fit in fits if fit.rotated_error is not None]
            cells = [fmean([getattr(fit, name) for fit in fits]) for name in ("error", "key_error", "value_error")]
            shown = " ".join(f"{cell:8.3f}" for cell in cells)
            behind = f"{fmean(rotated):8.3f}" if rotated else f"{'-':>8}"
            share = f"{effect.rank:>6} {effect.rank / width:9.0%}"
            lines.append(f"{share} {shown} {behind} {effect.kl:9.4f} {effect.same_token:6.0%}")
        return "\n".join(lines)


def fit(
    model: str | Path | LLM,
    rank: int | Sequence[int],
    layer: int | Sequence[int] | None = None,
    *,
    text: str | None = None,
    sample: int = SAMPLE,
    held_out: int = HELD_OUT,
) -> FitReport:
    """Fit latents of each ``rank`` to the keys and values of ``layer`` (None: of every layer) of a loaded model.

    ``sample`` tokens of ``text`` (by default prose that every Python carries) are fitted to, the next ``held_out`` are
    judged by. UsageError for ranks or layers that there are not, or too little text; SpecError for a model that leaves
    no keys and values, or has latents already; and what ``kvist.load`` raises for a name.
    """
    llm = model if isinstance(model, LLM) else load(model, ctx_size=None, max_num_seqs=1)
    ranks = [rank] if isinstance(rank, int) else list(rank)
    study = _Study(llm, layer, ranks, text, sample, held_out)
    fits = tuple(found for index in study.layers for found in study.fit(index, ranks))
    return FitReport(
        model=llm.setup.name if llm.setup is not None else "model",
        layers=study.layers,
        fits=fits,
        effects=tuple(study.effect(wanted, [found for found in fits if found.rank == wanted]) for wanted in ranks),
    )


def fit_rows(keys: Tensor, values: Tensor, rank: int, held_out: int | None = None, layer: int = 0) -> LatentFit:
    """Fit one latent of ``rank`` to keys [T, G, D] and values [T, G, Dv] of T tokens, taken before rotation.

    The last ``held_out`` rows (a fifth when None) are judged by and not fitted to. UsageError for a rank beyond what is
    kept, or fewer rows than two of each.
    """
    if keys.shape[:2] != values.shape[:2] or keys.dim() != 3 or values.dim() != 3:
        raise UsageError(f"keys {list(keys.shape)} and values {list(values.shape)} are not [T, G, D] and [T, G, Dv]")
    judged = len(keys) // 5 if held_out is None else held_out
    if not 2 <= judged <= len(keys) - 2:
        raise UsageError(f"{judged} of {len(keys)} rows to judge by: at least two are needed, and two to fit to")
    rows = torch.cat([keys.flatten(1), values.flatten(1)], 1).double()
    split = keys.shape[1] * keys.shape[2]
    _check_rank(rank, rows.shape[1])
    components = _Components(rows[: len(rows) - judged], split)
    return components.at(rank, layer, rows[len(rows) - judged :])


class _Components:
    """Principal components of rows [T, width], the first ``split`` columns of which are keys.

    Keys and values are brought to one size first, so that a latent does not spend all of itself on the larger ones.
    """

    def __init__(self, rows: Tensor, split: int) -> None:
        self.split = split
        self.mean = rows.mean(0)
        centred = rows - self.mean
        sizes = [part.square().mean().sqrt().clamp(min=1e-30) for part in (centred[:, :split], centred[:, split:])]
        self.scale = torch.cat([sizes[0].expand(split), sizes[1].expand(rows.shape[1] - split)])
        scaled = centred / self.scale
        _, vectors = torch.linalg.eigh(scaled.T @ scaled)
        self.vectors = vectors.flip(1)  # the largest first

    def at(self, rank: int, layer: int, judged: Tensor) -> LatentFit:
        """The first ``rank`` components as a latent, judged on rows [T, width]."""
        basis = self.vectors[:, :rank]
        up, down = self.scale[:, None] * basis, (basis / self.scale[:, None]).T
        centred = judged - self.mean
        off = (centred - centred @ down.T @ up.T) / self.scale
        scaled = centred / self.scale

        def error(columns: slice) -> float:
            return float(off[:, columns].norm() / scaled[:, columns].norm().clamp(min=1e-30))

        whole, k, v = slice(None), slice(self.split), slice(self.split, None)
        width = len(self.mean)
        return LatentFit(layer, rank, width, error(whole), error(k), error(v), None, self.mean, up, down)


class _Study:
    """A loaded model whose projections can be looked at, and replaced, on their way."""

    def __init__(
        self,
        llm: LLM,
        layer: int | Sequence[int] | None,
        ranks: Sequence[int],
        text: str | None,
        sample: int,
        held_out: int,
    ) -> None:
        decoder = llm.engine.decoder
        if not isinstance(decoder, Decoder):
            raise UsageError("this engine's decoder was not made by kvist.load: its projections cannot be looked at")
        if not llm.engine.idle:
            raise UsageError("requests are running: fit when the engine is idle")
        self.llm, self.decoder = llm, decoder
        spec = decoder.spec
        chosen = range(spec.num_layers) if layer is None else [layer] if isinstance(layer, int) else layer
        self.layers = tuple(chosen)
        if not self.layers or not all(0 <= index < spec.num_layers for index in self.layers):
            raise UsageError(f"layers {list(self.layers)}: this model has 0 to {spec.num_layers - 1}")
        self.widths = {self._width(index) for index in self.layers}
        if len(self.widths) > 1:
            raise UsageError(f"layers keep {sorted(self.widths)} numbers a token: fit those of one width together")
        self.width = self.widths.pop()
        for rank in ranks:
            _check_rank(rank, self.width)
        if sample < 2 * self.width:
            raise UsageError(f"{sample} tokens determine no {self.width} directions: use {2 * self.width} or more")
        self.tokens = self._tokens(text, sample + held_out)
        self.sample = sample
        self.rows = self._collect()
        self.plain = self._logits([])

    def fit(self, index: int, ranks: Sequence[int]) -> Iterator[LatentFit]:
        """The fits of one layer, with what the same ranks leave behind the rotation."""
        rows = self.rows[index]
        a = self._attention(index)
        split = a.num_kv_heads * a.head_dim
        plain = _Components(rows[: self.sample], split)
        turned = self._rotated(rows, a)
        behind = None if turned is None else _Components(turned[: self.sample], split)
        for rank in ranks:
            found = plain.at(rank, index, rows[self.sample :])
            if behind is not None and turned is not None:
                error = behind.at(rank, index, turned[self.sample :]).error
                found = replace(found, rotated_error=error)
            yield found

    def effect(self, rank: int, fits: Sequence[LatentFit]) -> Effect:
        """Run the held-out text with every fitted layer's keys and values taken through its latent."""
        p, q = (torch.log_softmax(logits.double(), -1) for logits in (self.plain, self._logits(fits)))
        kl = float((p.exp() * (p - q)).sum(-1).mean())
        return Effect(rank, kl, float((p.argmax(-1) == q.argmax(-1)).double().mean()))

    def _attention(self, index: int) -> Attention:
        attention = self.decoder.spec.layers[index].attention
        if not isinstance(attention, Attention):
            raise SpecError(f"layer {index} leaves latents already: there are no keys and values to fit to")
        return attention

    def _width(self, index: int) -> int:
        a = self._attention(index)
        return a.num_kv_heads * (a.head_dim + a.v_head_dim)

    def _tokens(self, text: str | None, count: int) -> list[int]:
        given = prose()[: count * 12] if text is None else text
        found = self.llm.tokenizer.encode(given)[:count]
        if len(found) < count:
            raise UsageError(f"the text gives {len(found)} tokens, and {count} are needed: give more, or lower sample")
        setup = self.llm.setup
        if setup is not None and count > setup.ctx_size:
            raise TooLong(f"{count} tokens exceed the context of {setup.ctx_size}: lower sample or raise ctx_size")
        return found

    def _collect(self) -> dict[int, Tensor]:
        """[K, V] of every token before rotation, float64 [T, width] of each layer."""
        rows: dict[int, list[Tensor]] = {index: [] for index in self.layers}

        def look(index: int, kv: Tensor) -> None:
            if index in rows:
                rows[index].append(kv.double())

        for _ in self._steps(self.tokens, look):
            pass
        return {index: torch.cat(parts) for index, parts in rows.items()}

    def _logits(self, fits: Sequence[LatentFit]) -> Tensor:
        """Logits of some positions of the held-out text, with the latents of ``fits`` in their layers."""
        by_layer = {found.layer: found for found in fits}

        def replaced(index: int, kv: Tensor) -> None:
            if index in by_layer:
                found = by_layer[index]
                latent = (kv.double() - found.mean) @ found.down.T
                kv.copy_(found.mean + latent @ found.up.T)

        tokens = self.tokens[self.sample :]
        wanted = sorted({round(i * (len(tokens) - 1) / (JUDGED - 1)) for i in range(JUDGED)})
        found = []
        first = 0
        for step in self._steps(tokens, replaced):
            rows = [position - first for position in wanted if first <= position < first + len(step.tokens)]
            found.append(self.decoder.logits(replace(step, rows=torch.tensor(rows, dtype=torch.int32))).clone())
            first += len(step.tokens)
        return torch.cat(found)

    def _steps(self, tokens: Sequence[int], look: Callable[[int, Tensor], None]) -> Iterator[Step]:
        """Feed ``tokens`` to an empty cache; ``look(layer, kv)`` sees and may change [K, V] before rotation."""
        self.llm.engine.forget()
        table = Table(self.llm.engine.groups, self.llm.engine.pools)
        names = {f"layer {index} qkv": index for index in range(self.decoder.spec.num_layers)}
        body = self.decoder.body
        try:
            for first in range(0, len(tokens), self.decoder.max_tokens):
                part = tokens[first : first + self.decoder.max_tokens]
                table.extend(len(part))
                step = Step(
                    torch.tensor(part, dtype=torch.int32),
                    torch.arange(first, first + len(part), dtype=torch.int32),
                    torch.tensor([0, len(part)], dtype=torch.int32),
                    tuple(torch.tensor([table.entries(group.index)], dtype=torch.int32) for group in table.groups),
                    torch.zeros(0, dtype=torch.int32),
                )
                for i, op in enumerate(body.ops):
                    body.run_range(step, i, i + 1)
                    index = names.get(op.name)
                    if index is not None and isinstance(op, Linear):
                        look(index, op.out[: len(part), -self._width(index) :])
                yield step
                table.commit(len(part))
                table.give_back()
        finally:
            table.release()

    def _rotated(self, rows: Tensor, a: Attention) -> Tensor | None:
        """The same rows with their keys rotated by position, as a cache holds them; None without rotation."""
        if a.rope is None:
            return None
        split = a.num_kv_heads * a.head_dim
        cos, sin = (table.double() for table in rope_table(a.rope, len(rows)))
        keys = rotate(rows[:, :split].view(len(rows), a.num_kv_heads, a.head_dim), cos, sin)
        return torch.cat([keys.flatten(1), rows[:, split:]], 1)


def _check_rank(rank: int, width: int) -> None:
    if not 1 <= rank <= width:
        raise UsageError(f"rank {rank}: a token keeps {width} numbers in this layer, so use 1 to {width}")
