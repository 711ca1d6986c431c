"""Native kernels against torch's in one run, and what giving up the laws would buy. Prints a table, or JSON (--json).

Each comparison alternates: native, torch, native, torch, ... so that what else the machine does falls on both. A ratio
above 1 means that the native kernel is faster. Nothing here asserts on time.

What giving up the laws would buy is bounded from three sides:

- products: the ratio to torch's, which is oneDNN's and changes its order of summation with the number of rows;
- decoding: no kernel reads K and V faster than memory does, whatever its order, so limit / measured is all there is to
  gain; and a run with splits as long as the context, priced by a model of what a split costs beyond its bytes;
- prefill: torch's flash attention carries one maximum through all keys, which the split contract forbids.
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
from kvist.kernels.ops import Attend, LayerStore, Linear, Op, Step, torch_dtype
from kvist.measure.limits import beyond_cache, plain_step, read_bandwidth
from kvist.verify.compare import attend_bound, linear_bound, relative_error

SECONDS = 0.05  # of one timed run
# (name, N, K): SmolLM2's four products and a larger one, 32 MiB of bfloat16, beyond most second-level caches.
MATRICES = (("qkv", 960, 576), ("gate up", 3072, 576), ("down", 576, 1536), ("head", 49152, 576), ("large", 4096, 4096))
ROWS = (1, 4, 16, 512)
BLOCK = 64


def compare(
    what: dict[str, Any], actions: dict[str, Callable[[], object]], work: float, unit: str, rounds: int
) -> dict[str, Any]:
    """One row: rates of both in ``unit`` (work per second / 1e9), and torch's time over native's, round by round."""
    seconds = in_turns(actions, rounds, SECONDS)
    ratios = [b / a for a, b in zip(seconds["native"], seconds["torch"], strict=True)]
    return what | {
        f"native_{unit}": work / median(seconds["native"]) / 1e9,
        f"torch_{unit}": work / median(seconds["torch"]) / 1e9,
        "ratio": median(ratios),
        "min": min(ratios),
        "max": max(ratios),
    }


def products(backend: NativeBackend, dtype: DType, rounds: int, rows: tuple[int, ...]) -> list[dict[str, Any]]:
    """Linear layers at several numbers of rows; with few rows eight in one call, since a step is one call."""
    found = []
    element = torch_dtype(dtype)
    for name, n, k in MATRICES:
        w = (torch.randn(n, k) * k**-0.5).to(element)
        weight = backend.weight(n, k, dtype)
        weight.fill(0, w)
        for m in rows:
            x, out = torch.randn(m, k).to(element), torch.empty(m, n)
            calls = 8 if m <= 16 else 1
            ops: list[Op] = [Linear("product", x, weight, out) for _ in range(calls)]
            executor, step = backend.compile(ops), plain_step(m)
            executor.run(step)
            error = relative_error(out, x.double() @ w.double().T)
            assert error <= linear_bound(k), f"{name} at {m} rows: error {error}"
            actions = {
                "native": lambda executor=executor, step=step: executor.run(step),
                "torch": lambda x=x, w=w, calls=calls: [linear(x, w) for _ in range(calls)],
            }
            what = {"op": "linear", "dtype": dtype.name, "name": name, "n": n, "k": k, "rows": m}
            found.append(compare(what, actions, 2.0 * m * n * k * calls, "gflops", rounds))
            report(found[-1])
    return found


class Cache:
    """One request's keys and values in as many layers as lie beyond every cache, for both kernels."""

    def __init__(self, dtype: DType, kv_heads: int, width: int, depth: int, nbytes: int) -> None:
        self.dtype, self.kv_heads, self.width, self.depth = dtype, kv_heads, width, depth
        element = torch_dtype(dtype)
        blocks = -(-depth // BLOCK)
        block = block_elements(kv_heads, width, width, BLOCK) * dtype.bytes
        self.layer_bytes = depth * kv_heads * 2 * width * dtype.bytes
        self.layers = max(1, -(-nbytes // (blocks * block)))
        self.table = torch.arange(blocks, dtype=torch.int32)
        self.k = torch.randn(1, kv_heads, depth, width).to(element).expand(self.layers, -1, -1, -1).contiguous()
        self.v = torch.randn(1, kv_heads, depth, width).to(element).expand(self.layers, -1, -1, -1).contiguous()
        data = torch.zeros(self.layers, blocks, block, dtype=torch.uint8)
        self.stores = [LayerStore(data[i], dtype, BLOCK, kv_heads, width, width, 0) for i in range(self.layers)]
        write_kv(self.stores[0], self.table, torch.arange(depth), self.k[0].transpose(0, 1), self.v[0].transpose(0, 1))
        data[1:] = data[:1]


def attention(
    backend: NativeBackend, dtype: DType, shape: tuple[int, int, int], depth: int, tokens: int, rounds: int, nbytes: int
) -> dict[str, Any]:
    """Attention of the last ``tokens`` of ``depth`` positions against torch's, over the same values."""
    heads, kv_heads, width = shape
    cache = Cache(dtype, kv_heads, width, depth, nbytes if tokens == 1 else 0)
    q = (torch.randn(1, heads, tokens, width) * width**-0.5).to(torch_dtype(dtype))
    flat = q[0].transpose(0, 1).reshape(tokens, heads * width).contiguous()
    out = torch.empty(tokens, heads * width)
    ops: list[Op] = [Attend("attend", flat, out, store, heads) for store in cache.stores]
    step = Step(
        torch.zeros(tokens, dtype=torch.int32),
        torch.arange(depth - tokens, depth, dtype=torch.int32),
        torch.tensor([0, tokens], dtype=torch.int32),
        (cache.table[None],),
        torch.zeros(0, dtype=torch.int32),
    )
    executor = backend.compile(ops)
    layers = range(cache.layers)
    causal = tokens > 1
    assert not causal or tokens == depth, "torch's causal mask begins at the first key"

    def flash() -> None:
        for i in layers:
            k, v = cache.k[i : i + 1], cache.v[i : i + 1]
            scaled_dot_product_attention(q, k, v, scale=1.0, enable_gqa=heads != kv_heads, is_causal=causal)

    executor.run(step)
    k, v = (x[:1].double().repeat_interleave(heads // kv_heads, 1) for x in (cache.k, cache.v))
    exact = scaled_dot_product_attention(q.double(), k, v, scale=1.0, is_causal=causal)
    error = relative_error(out, exact[0].transpose(0, 1).reshape(tokens, -1))
    assert error <= attend_bound(dtype.name), f"attention over {dtype.name} at {depth}: error {error}"
    what = {"op": "attend", "dtype": dtype.name, "heads": heads, "kv_heads": kv_heads, "head_dim": width}
    what |= {"depth": depth, "tokens": tokens}
    actions = {"native": lambda: executor.run(step), "torch": flash}
    if tokens == 1:
        return compare(what, actions, cache.layers * cache.layer_bytes, "gbps", rounds)
    pairs = depth * (depth + 1) // 2
    return compare(what, actions, cache.layers * 4.0 * heads * width * pairs, "gflops", rounds)


def split_price(backend: NativeBackend, shape: tuple[int, int, int], rounds: int) -> dict[str, Any]:
    """What a split costs beyond its bytes, from caches that lie in the second-level cache: seconds = a + b splits.

    A carried maximum would save at most the part of b that is not reading and multiplying; with everything in cache
    the whole of b is an upper bound of it.
    """
    heads, kv_heads, width = shape
    short, long = 128, 1024
    actions: dict[str, Callable[[], object]] = {}
    for depth in (short, long):
        cache = Cache(BFLOAT16, kv_heads, width, depth, 0)
        q, out = torch.randn(1, heads * width).bfloat16(), torch.empty(1, heads * width)
        step = Step(
            torch.zeros(1, dtype=torch.int32),
            torch.tensor([depth - 1], dtype=torch.int32),
            torch.tensor([0, 1], dtype=torch.int32),
            (cache.table[None],),
            torch.zeros(0, dtype=torch.int32),
        )
        executor = backend.compile([Attend("attend", q, out, cache.stores[0], heads) for _ in range(8)])
        actions[str(depth)] = lambda executor=executor, step=step: executor.run(step)
    seconds = in_turns(actions, rounds, SECONDS)
    first, second = (median(seconds[str(depth)]) / 8 for depth in (short, long))
    return {
        "op": "one split",
        "microseconds": (second - first) / (long / 128 - 1) * 1e6,
        "heads": heads,
        "head_dim": width,
    }


def give_up(rows: list[dict[str, Any]], ram_gbps: float, split: dict[str, Any]) -> dict[str, float]:
    """Upper bounds of what kernels without the laws could gain, as factors of time: 1.0 is nothing."""

    def best(op: str, **wanted: Any) -> list[float]:
        return [r["ratio"] for r in rows if r["op"] == op and all(r.get(k) == v for k, v in wanted.items())]

    decode = [r["native_gbps"] for r in rows if "native_gbps" in r]
    bounds = {
        "one row, oneDNN's product instead": max((1 / r for r in best("linear", rows=1)), default=1.0),
        "512 rows, oneDNN's product instead": max((1 / r for r in best("linear", rows=512)), default=1.0),
        "decoding, any kernel that reads memory": max((ram_gbps / g for g in decode), default=1.0),
        "prefill, torch's carried maximum instead": max(
            (1 / r["ratio"] for r in rows if r["op"] == "attend" and r["tokens"] > 1), default=1.0
        ),
    }
    return {name: max(1.0, value) for name, value in bounds.items()} | {
        "one split in cache, microseconds": split["microseconds"]
    }


def report(row: dict[str, Any]) -> None:
    what = "  ".join(f"{k} {v}" for k, v in row.items() if not isinstance(v, float))
    rates = "  ".join(f"{k} {v:.1f}" for k, v in row.items() if isinstance(v, float) and "_" in k)
    print(
        f"{what}  {rates}  ratio {row['ratio']:.2f} ({row['min']:.2f} to {row['max']:.2f})", file=sys.stderr, flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    parser.add_argument("--quick", action="store_true", help="fewer shapes and rounds")
    parser.add_argument("--threads", type=int, help="threads of both; all processors when not given")
    parser.add_argument("--variant", help="kernel variant, the best when not given")
    options = parser.parse_args()
    backend = NativeBackend(options.variant, options.threads)
    torch.set_num_threads(backend.threads)
    rounds = 3 if options.quick else 9
    rows = products(backend, BFLOAT16, rounds, (1, 512) if options.quick else ROWS)
    if not options.quick:
        rows += products(backend, FLOAT32, rounds, (1, 512))
    nbytes = beyond_cache()
    smollm2, wide = (9, 3, 64), (32, 8, 128)
    cases = [(smollm2, 4096, 1), (smollm2, 512, 512)]
    if not options.quick:
        cases += [
            (smollm2, 1024, 1),
            (smollm2, 8192, 1),
            (wide, 4096, 1),
            ((4, 1, 256), 4096, 1),
            ((8, 8, 64), 4096, 1),
        ]
        cases += [(smollm2, 4096, 4096), (wide, 2048, 2048), ((4, 1, 256), 2048, 2048)]
    for shape, depth, tokens in cases:
        rows.append(attention(backend, BFLOAT16, shape, depth, tokens, rounds, nbytes))
        report(rows[-1])
    reading = read_bandwidth(backend, [backend.threads], perf_counter, rounds)
    ram = max(r.rate.highest for r in reading if r.source == "ram")
    for row in rows:
        if "native_gbps" in row:
            row["of_limit"] = row["native_gbps"] / ram
    split = split_price(backend, smollm2, rounds)
    result = {
        "variant": backend.variant,
        "threads": backend.threads,
        "torch": torch.__version__,
        "read_gbps": ram,
        "rows": rows,
        "at_most_gained": give_up(rows, ram, split),
    }
    if options.json:
        print(json.dumps(result, indent=1))
        return
    print(f"\n{backend.name}, {backend.threads} threads; memory reads {ram:.1f} GB/s")
    for name, value in result["at_most_gained"].items():
        print(f"  {name:<44}{value:6.2f}" + ("" if "micro" in name else "x at most"))


if __name__ == "__main__":
    main()
