"""B41: sliding layers are charged their window, not the context and not nothing; the inverse is found by search."""

from __future__ import annotations

import pytest

from kvist.base.dtypes import BFLOAT16
from kvist.cache.addressing import Paged
from kvist.cache.layout import Group, Layout
from kvist.cache.pool import Pool
from kvist.cache.rows import KeyValue
from kvist.cache.sizing import blocks_for, context_bytes, largest_context, row_bytes


def hybrid(full: int, sliding: int, window: int, heads: int, width: int) -> tuple[Group, ...]:
    layout = Layout(KeyValue(heads, width, width), BFLOAT16, Paged(16))
    return (
        Group(0, tuple(range(full)), layout),
        Group(1, tuple(range(full, full + sliding)), layout, window),
    )


GPT_OSS = hybrid(12, 12, 128, 8, 64)
GEMMA3_1B = hybrid(4, 22, 512, 1, 256)


def test_gpt_oss_at_131072_tokens() -> None:
    assert row_bytes(GPT_OSS, 131_072) == 3_224_371_200 == 3 * 2**30 + 3 * 2**20


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(1, 26_624), (511, 13_604_864), (512, 13_631_488), (513, 13_635_584), (1024, 15_728_640), (32_768, 145_752_064)],
)
def test_gemma3_1b_around_its_window(tokens: int, expected: int) -> None:
    assert row_bytes(GEMMA3_1B, tokens) == expected


def test_32_sequences_of_8192() -> None:
    minimal = 32 * row_bytes(GPT_OSS, 8192)
    assert f"{minimal / 2**30:.2f}" == "6.09"
    everything = 32 * sum(8192 * group.bytes_per_token for group in GPT_OSS)
    assert everything == 12 * 2**30
    # What is really allocated lies between: whole blocks, and room for one chunk beside the window.
    allocated = context_bytes(GPT_OSS, 8192, chunk=512, sequences=32)
    assert minimal < allocated < everything
    assert allocated == 32 * (12 * 8192 + 12 * 16 * ((127 + 512 + 14) // 16 + 1)) * 2048


@pytest.mark.parametrize("chunk", [1, 64, 512])
def test_the_inverse_for_100_mib(chunk: int) -> None:
    available = 100 * 2**20
    largest = largest_context(GEMMA3_1B, available, chunk)
    assert context_bytes(GEMMA3_1B, largest, chunk) <= available < context_bytes(GEMMA3_1B, largest + 1, chunk)


def test_the_pool_allocates_what_was_stated() -> None:
    assert Pool(GEMMA3_1B, blocks_for(GEMMA3_1B, 700, 64)).nbytes == context_bytes(GEMMA3_1B, 700, 64)
