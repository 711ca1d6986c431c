"""Attention over latents against the roof, against expansion at each step, and against plain attention: table or JSON.

One layer of 512 + 64 after the other, as many as lie beyond every cache. The roof of a step is the slower of two: its
operations at the rate of the fastest product there is here (a native linear layer's or torch's, taking turns with what
is measured), its bytes at the rate of a bare sum over memory, measured at the beginning. Its share is the roof's time
over the kernel's. Nothing here asserts on time.

"Expanded" is what transformers does with a cache of latents: at each step every stored latent is multiplied out to keys
and values of all heads, and then attended with one query.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch.nn.functional import linear, scaled_dot_product_attention
from turns import in_turns

from kvist.base.dtypes import BFLOAT16, FLOAT32, DType
from kvist.kernels.blockformat import block_elements, write_kv
from kvist.kernels.native import NativeBackend
from kvist.kernels.ops import Attend, AttendExpanded, GroupedLinear, LayerStore, Linear, Op, Step, Weight, torch_dtype
from kvist.measure.limits import beyond_cache, plain_step, read_bandwidth
from kvist.verify.compare import attend_bound, relative_error

RANK, ROPE, NOPE, VALUE = 512, 64, 128, 128  # DeepSeek's widths
BLOCK = 128
SECONDS = 0.2  # of one timed run


class Rows:
    """One request's rows in as many layers as lie beyond every cache: latents, or keys and values."""

    def __init__(self, dtype: DType, depth: int, nbytes: int, kv_heads: int = 0, width: int = 0) -> None:
        latent = not kv_heads
        kv_heads, key, value = (1, RANK + ROPE, RANK) if latent else (kv_heads, width, width)
        blocks = -(-depth // BLOCK)
        block = block_elements(kv_heads, key, 0 if latent else value, BLOCK) * dtype.bytes
        self.nbytes = depth * block // BLOCK
        self.layers = max(1, -(-nbytes // (blocks * block)))
        self.table = torch.arange(blocks, dtype=torch.int32)
        data = torch.zeros(self.layers, blocks, block, dtype=torch.uint8)
        self.stores = [LayerStore(layer, dtype, BLOCK, kv_heads, key, value, 0, latent) for layer in data]
        self.k = torch.randn(depth, kv_heads, key).to(torch_dtype(dtype))
        v = None if latent else torch.randn(depth, kv_heads, value).to(torch_dtype(dtype))
        write_kv(self.stores[0], self.table, torch.arange(depth), self.k, v)
        data[1:] = data[:1]

    def step(self, depth: int, tokens: int) -> Step:
        """The last ``tokens`` of ``depth`` positions."""
        return Step(
            torch.zeros(tokens, dtype=torch.int32),
            torch.arange(depth - tokens, depth, dtype=torch.int32),
            torch.tensor([0, tokens], dtype=torch.int32),
            (self.table[None],),
            torch.zeros(0, dtype=torch.int32),
        )


PRODUCT = 2.0 * 480 * 2048 * 2048  # operations of one of `products`


def products(backend: NativeBackend, dtype: DType) -> dict[str, Callable[[], object]]:
    """A large product, native and torch's: the measure of what can be computed."""
    rows, size = 480, 2048
    weight, w = backend.weight(size, size, dtype), torch.randn(size, size).to(torch_dtype(dtype))
    weight.fill(0, w)
    x = torch.randn(rows, size).to(torch_dtype(dtype))
    ops: list[Op] = [Linear("product", x, weight, torch.empty(rows, size))]
    executor, step = backend.compile(ops), plain_step(rows)
    return {"native product": lambda: executor.run(step), "torch product": lambda: linear(x, w)}


def attention(
    backend: NativeBackend, dtype: DType, heads: int, depth: int, tokens: int, bandwidth: float, rounds: int
) -> dict[str, Any]:
    """One step's attention over latents: time of a layer, and its share of the roof."""
    rows = Rows(dtype, depth, beyond_cache() if tokens == 1 else 0)
    kind = torch.bfloat16 if dtype == BFLOAT16 else torch.float32
    q = (torch.randn(tokens, heads * (RANK + ROPE)) * (RANK + ROPE) ** -0.5).to(kind)
    out = torch.empty(tokens, heads * RANK)
    executor = backend.compile([Attend("attend", q, out, store, heads) for store in rows.stores])
    step = rows.step(depth, tokens)
    executor.run(step)
    if tokens == 1:
        k = rows.k[:, 0].double()
        exact = torch.softmax(q.double().view(heads, -1) @ k.T, -1) @ k[:, :RANK]
        error = relative_error(out.view(heads, RANK), exact)
        assert error <= attend_bound(dtype.name), f"{heads} heads over {dtype.name} at {depth}: error {error}"
    pairs = tokens * depth - tokens * (tokens - 1) / 2
    operations = 2.0 * heads * (2 * RANK + ROPE) * pairs
    seconds = in_turns({"latent": lambda: executor.run(step), **products(backend, dtype)}, rounds, SECONDS)
    layers = [value / rows.layers for value in seconds["latent"]]
    # Each round has its own ceiling: what else the machine does falls on both.
    fastest = [min(pair) for pair in zip(seconds["native product"], seconds["torch product"], strict=True)]
    compute = [operations / PRODUCT * value for value in fastest]
    memory = rows.nbytes / bandwidth
    shares = [max(a, memory) / b for a, b in zip(compute, layers, strict=True)]
    return {
        "op": "latent",
        "dtype": dtype.name,
        "heads": heads,
        "depth": depth,
        "tokens": tokens,
        "layers": rows.layers,
        "milliseconds": median(layers) * 1e3,
        "gflops": operations / median(layers) / 1e9,
        "gbps": rows.nbytes / median(layers) / 1e9,
        "product_gflops": PRODUCT / median(fastest) / 1e9,
        "bound": "compute" if median(compute) > memory else "memory",
        "share": median(shares),
        "min": min(shares),
        "max": max(shares),
        "ns_per_token_and_head": median(layers) / depth / heads / tokens * 1e9,
    }


def projections(
    backend: NativeBackend, dtype: DType, heads: int
) -> tuple[torch.Tensor, torch.Tensor, tuple[Weight, ...], tuple[Weight, ...]]:
    """W_UK [H, nope, C] and W_UV [H, value, C], and both as weights of each head."""
    w_uk, w_uv = (torch.randn(heads, n, RANK) * RANK**-0.5 for n in (NOPE, VALUE))
    uk, uv = (tuple(backend.weight(n, k, dtype) for _ in range(heads)) for n, k in ((RANK, NOPE), (VALUE, RANK)))
    for head in range(heads):
        uk[head].fill(0, w_uk[head].T)
        uv[head].fill(0, w_uv[head])
    return w_uk, w_uv, uk, uv


def expanded(backend: NativeBackend, dtype: DType, heads: int, depth: int, rounds: int) -> dict[str, Any]:
    """A layer's whole attention of one token, projections of the latents included, absorbed against expanded."""
    kind = torch_dtype(dtype)
    rows = Rows(dtype, depth, 0)
    w_uk, w_uv, uk, uv = projections(backend, dtype, heads)
    scale = (NOPE + ROPE) ** -0.5
    q = torch.randn(1, heads * (NOPE + ROPE)) * 0.3
    absorbed, latent = torch.empty(1, heads * RANK), torch.empty(1, heads * RANK)
    wide = torch.zeros(1, heads * (RANK + ROPE), dtype=torch.bfloat16 if dtype == BFLOAT16 else torch.float32)
    out = torch.empty(1, heads * VALUE)
    absorb = backend.compile([GroupedLinear("absorb", q, uk, absorbed, heads, source_stride=NOPE + ROPE)])
    ops: list[Op] = [
        Attend("attend", wide, latent, rows.stores[0], heads),
        GroupedLinear("values", latent, uv, out, heads, source_stride=RANK),
    ]
    attend, step = backend.compile(ops), rows.step(depth, 1)

    def native() -> None:
        absorb.run(step)
        parts = (absorbed.view(heads, RANK), q.view(heads, -1)[:, NOPE:])
        wide.view(heads, -1).copy_(torch.cat(parts, 1) * scale)
        attend.run(step)

    kv_b = torch.cat((w_uk, w_uv), 1).flatten(0, 1).to(kind)  # kv_b_proj: [heads * (nope + value), rank]
    rows_k = rows.k[:, 0]
    query = q.view(heads, 1, -1).to(kind)[None]

    def expand() -> torch.Tensor:
        kv = linear(rows_k[:, :RANK], kv_b).view(1, depth, heads, NOPE + VALUE).transpose(1, 2)
        k_rope = rows_k[None, None, :, RANK:].expand(-1, heads, -1, -1)
        keys = torch.cat((kv[..., :NOPE], k_rope), -1)
        return scaled_dot_product_attention(query, keys, kv[..., NOPE:], scale=scale)

    native()
    error = relative_error(out.view(heads, VALUE), expand()[0, :, 0].double())
    assert error < 3e-2, f"absorbed and expanded differ by {error}"
    seconds = in_turns({"native": native, "expanded": expand}, rounds, SECONDS)
    ratios = [b / a for a, b in zip(seconds["native"], seconds["expanded"], strict=True)]
    return {
        "op": "against expansion",
        "dtype": dtype.name,
        "heads": heads,
        "depth": depth,
        "milliseconds": median(seconds["native"]) * 1e3,
        "expanded_milliseconds": median(seconds["expanded"]) * 1e3,
        "ratio": median(ratios),
        "min": min(ratios),
        "max": max(ratios),
        "error": error,
    }


def against_plain(backend: NativeBackend, dtype: DType, depth: int, rounds: int) -> dict[str, Any]:
    """128 heads over one latent against 128 heads with keys and values of their own, 192 and 128 wide, as 160 and 160.

    Per cached token and head: a latent computes 2.125 times 512 + 64 for what expanded rows do with 320, and reads 576
    elements for all heads in place of 320 for each.
    """
    heads, width = 128, (NOPE + ROPE + VALUE) // 2
    latent, plain = Rows(dtype, depth, 0), Rows(dtype, depth, 0, heads, width)
    kind = torch.bfloat16 if dtype == BFLOAT16 else torch.float32
    actions: dict[str, Callable[[], object]] = {}
    for name, rows, key, value in (("latent", latent, RANK + ROPE, RANK), ("plain", plain, width, width)):
        q, out = torch.randn(1, heads * key).to(kind) * key**-0.5, torch.empty(1, heads * value)
        executor, step = backend.compile([Attend(name, q, out, rows.stores[0], heads)]), rows.step(depth, 1)
        actions[name] = lambda executor=executor, step=step: executor.run(step)
    seconds = in_turns(actions, rounds, SECONDS)
    each = {name: median(values) / depth / heads * 1e9 for name, values in seconds.items()}
    return {
        "op": "against plain",
        "dtype": dtype.name,
        "heads": heads,
        "depth": depth,
        "latent_ns_per_token_and_head": each["latent"],
        "plain_ns_per_token_and_head": each["plain"],
        "ratio": each["plain"] / each["latent"],
        "latent_bytes": latent.nbytes,
        "plain_bytes": plain.nbytes,
    }


def prefill(backend: NativeBackend, dtype: DType, heads: int, depth: int, tokens: int, rounds: int) -> dict[str, Any]:
    """The last ``tokens`` of ``depth``: absorbed, projections included, against expanding the latents for them.

    Expanding is outside law 1, since decoding stays absorbed and the two have different sums.
    """
    rows = Rows(dtype, depth, 0)
    kind = torch.bfloat16 if dtype == BFLOAT16 else torch.float32
    w_uk, _, uk, uv = projections(backend, dtype, heads)
    keys = tuple(backend.weight(NOPE, RANK, dtype) for _ in range(heads))
    for head in range(heads):
        keys[head].fill(0, w_uk[head])
    step, scale = rows.step(depth, tokens), (NOPE + ROPE) ** -0.5
    q = torch.randn(tokens, heads * (NOPE + ROPE))
    absorbed, latent = torch.empty(tokens, heads * RANK), torch.empty(tokens, heads * RANK)
    wide = torch.zeros(tokens, heads * (RANK + ROPE), dtype=kind)
    own = (q * scale).to(kind)
    out, answer = torch.empty(tokens, heads * VALUE), torch.empty(tokens, heads * VALUE)
    absorb = backend.compile([GroupedLinear("absorb", q, uk, absorbed, heads, source_stride=NOPE + ROPE)])
    ops: list[Op] = [
        Attend("attend", wide, latent, rows.stores[0], heads),
        GroupedLinear("values", latent, uv, out, heads, source_stride=RANK),
    ]
    attend = backend.compile(ops)
    expand = backend.compile([AttendExpanded("attend", own, answer, rows.stores[0], heads, keys, uv)])
    absorb.run(step)
    parts = (absorbed.view(tokens, heads, RANK), q.view(tokens, heads, -1)[..., NOPE:])
    wide.view(tokens, heads, -1).copy_(torch.cat(parts, -1) * scale)
    attend.run(step)
    expand.run(step)
    error = relative_error(answer, out.double())
    assert error < 3e-2, f"absorbed and expanded differ by {error}"
    actions = {"absorbed": lambda: (absorb.run(step), attend.run(step)), "expanded": lambda: expand.run(step)}
    seconds = in_turns(actions, rounds, SECONDS)
    return {
        "op": "prefill",
        "dtype": dtype.name,
        "heads": heads,
        "depth": depth,
        "tokens": tokens,
        "absorbed_milliseconds": median(seconds["absorbed"]) * 1e3,
        "expanded_milliseconds": median(seconds["expanded"]) * 1e3,
        "absorbed_over_expanded": median(seconds["absorbed"]) / median(seconds["expanded"]),
    }


def report(row: dict[str, Any]) -> None:
    """One line for a reader, on standard error."""
    shown = "  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{v}" for k, v in row.items() if k != "op")
    print(f"{row['op']}: {shown}", file=sys.stderr, flush=True)


def main() -> None:
    """Run everything, or a part of it (--quick)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="depth 8192 and the roof only")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--variant", default=None)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    backend = NativeBackend(arguments.variant)
    torch.set_num_threads(backend.threads)
    reading = [
        r for r in read_bandwidth(backend, (backend.threads,), perf_counter, arguments.rounds) if r.source == "ram"
    ]
    found: list[dict[str, Any]] = []
    machine: dict[str, Any] = {"op": "machine", "threads": backend.threads, "gbps": reading[0].rate.median}
    report(machine)
    for dtype in (BFLOAT16, FLOAT32):
        bandwidth = machine["gbps"] * 1e9
        for heads, depth, tokens in ((16, 8192, 1), (16, 65536, 1), (128, 8192, 1), (16, 2048, 512)):
            if arguments.quick and (depth, tokens) != (8192, 1):
                continue
            found.append(attention(backend, dtype, heads, depth, tokens, bandwidth, arguments.rounds))
            report(found[-1])
        if not arguments.quick:
            for depth in (8192, 65536) if dtype == BFLOAT16 else (8192,):
                found.append(expanded(backend, dtype, 16, depth, min(3, arguments.rounds)))
                report(found[-1])
            found.append(against_plain(backend, dtype, 2048, arguments.rounds))
            report(found[-1])
            for tokens in (64, 128, 256, 512) if dtype == BFLOAT16 else ():
                found.append(prefill(backend, dtype, 16, 4096, tokens, min(3, arguments.rounds)))
                report(found[-1])
    if arguments.json:
        print(json.dumps({"machine": machine, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
