"""Any history of one layer's cache beside a plain list of rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvist.base.errors import NotResident
from kvist.kernels.reference import ReferenceBackend
from kvist.layer import LayerCache
from kvist.verify.compare import assert_close, attend_bound

KINDS = (
    {"capacity": 200},
    {"capacity": 200, "addressing": "contiguous"},
    {"capacity": 200, "window": 5},
    {"capacity": 200, "window": 16},
    {"capacity": 12, "addressing": "ring", "sinks": 3},
    {"capacity": 33, "addressing": "ring"},
)
CHUNK = 9


class Layer(RuleBasedStateMachine):
    @initialize(kind=st.sampled_from(range(len(KINDS))), dtype=st.sampled_from(["float32", "bfloat16"]))
    def build(self, kind: int, dtype: str) -> None:
        self.cache = LayerCache(
            2, 4, 6, dtype=dtype, chunk=CHUNK, backend=ReferenceBackend(), poison=True, **KINDS[kind]
        )  # type: ignore[arg-type]
        self.dtype = torch.bfloat16 if dtype == "bfloat16" else torch.float32
        self.k: list[torch.Tensor] = []
        self.v: list[torch.Tensor] = []
        self.generator = torch.Generator().manual_seed(kind)
        self.appended = 0

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    @rule(n=st.integers(0, CHUNK))
    def append(self, n: int) -> None:
        k, v = self.draw(n, 2, 4), self.draw(n, 2, 6)
        if len(self.k) + n > 200:
            return
        self.cache.append(k, v)
        self.k += list(k)
        self.v += list(v)
        self.appended = n

    @rule(order=st.permutations(range(4)))
    def cells(self, order: list[int]) -> None:
        if len(self.k) >= 200:
            return
        k, v, pos = self.draw(2, 4), self.draw(2, 6), len(self.k)
        for cell in order:
            head = cell % 2
            if cell < 2:
                self.cache.store_k(head, pos, k[head])
            else:
                self.cache.store_v(head, pos, v[head])
        self.k.append(k)
        self.v.append(v)
        self.appended = 1

    @rule(length=st.integers(0, 60))
    def truncate(self, length: int) -> None:
        c = self.cache
        if 0 < length < len(self.k) and c.window is not None and len(self.k) > c.window:
            with pytest.raises(NotResident, match=f"from {len(self.k)} to {length} tokens"):
                c.truncate(length)
            return
        c.truncate(length)
        del self.k[length:], self.v[length:]
        self.appended = min(self.appended, 1)

    @rule()
    def attend(self) -> None:
        n = min(self.appended, len(self.k))
        if n == 0:
            return
        q = self.draw(n, 4, 4).float()
        out = self.cache.attend(q, scale=1.0)
        k, v = torch.stack(self.k).double(), torch.stack(self.v).double()
        expected = torch.empty(n, 4, 6, dtype=torch.float64)
        for t in range(n):
            p = len(self.k) - n + t
            window, sinks = self.cache.window, self.cache.sinks
            seen = [j for j in range(p + 1) if window is None or p - j < window or j < sinks]
            for h in range(4):
                weights = torch.softmax(k[seen, h // 2] @ q[t, h].double(), 0)
                expected[t, h] = weights @ v[seen, h // 2]
        assert_close(out, expected, attend_bound(self.cache.dtype))

    @invariant()
    def rows_are_those_of_the_list(self) -> None:
        if not hasattr(self, "cache"):
            return
        c, seen = self.cache, len(self.k)
        assert c.seen == seen
        expected = [j for j in range(seen) if c.window is None or seen - j <= c.window or j < c.sinks]
        assert c.positions == expected
        assert len(c) == len(expected)
        for head in range(2):
            k, v = c.retrieve_k(head), c.retrieve_v(head)
            assert k.shape == (len(expected), 4)
            assert v.shape == (6, len(expected))
            if expected:
                assert torch.equal(k, torch.stack([self.k[j][head] for j in expected]))
                assert torch.equal(v, torch.stack([self.v[j][head] for j in expected], 1))


Layer.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestLayer = Layer.TestCase
