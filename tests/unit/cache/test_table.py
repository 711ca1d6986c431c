from __future__ import annotations

import pytest

from kvist.base.dtypes import FLOAT32
from kvist.base.errors import CacheError, NotResident, OutOfBlocks, TooLong, UsageError
from kvist.cache.addressing import Addressing, Contiguous, Paged, Ring
from kvist.cache.blocks import BlockPool
from kvist.cache.check import check
from kvist.cache.layout import Group, Layout
from kvist.cache.rows import KeyValue, State
from kvist.cache.table import GONE, Table


def group(index: int = 0, window: int | None = None, addressing: Addressing | None = None) -> Group:
    return Group(index, (index,), Layout(KeyValue(1, 4, 4), FLOAT32, addressing or Paged(4)), window)


def table(*groups: Group, blocks: int = 16) -> tuple[Table, list[BlockPool]]:
    pools = [BlockPool(blocks) for _ in groups]
    return Table(groups, pools), pools


def feed(t: Table, n: int) -> None:
    t.extend(n)
    t.commit(n)
    t.give_back()


def test_the_four_counts() -> None:
    t, _ = table(group())
    t.extend(6)
    assert (t.length, t.written, t.start(0), t.resident(0)) == (6, 0, 0, 0)
    t.commit(5)
    assert (t.length, t.written, t.start(0), t.resident(0)) == (6, 5, 0, 5)
    assert list(t.entries(0)) == [0, 1]


def test_blocks_are_taken_only_at_block_edges() -> None:
    t, _ = table(group())
    taken = []
    for _ in range(9):
        taken.append(t.needed(1)[0])
        feed(t, 1)
    assert taken == [1, 0, 0, 0, 1, 0, 0, 0, 1]


def test_written_cannot_pass_what_was_reserved() -> None:
    t, _ = table(group())
    t.extend(3)
    with pytest.raises(CacheError, match="4 rows cannot be committed: 0 are written and places reach to 3, so 0 to 3"):
        t.commit(4)
    with pytest.raises(CacheError):
        t.commit(-1)
    assert t.written == 0


def test_a_window_gives_blocks_back_without_renumbering() -> None:
    t, pools = table(group(window=6))
    for _ in range(13):
        feed(t, 1)
    # The token at 13 sees 8..13: blocks 0 and 1 are gone, block index stays position // 4.
    assert list(t.entries(0)) == [GONE, GONE, t.entries(0)[2], t.entries(0)[3]]
    assert (t.start(0), t.written, t.resident(0)) == (8, 13, 5)
    assert pools[0].num_used == 2


def test_a_window_that_is_not_given_back_keeps_everything() -> None:
    t, pools = table(group(window=2))
    t.extend(12)
    t.commit(12)
    assert pools[0].num_used == 3
    assert t.give_back() == 2
    assert t.give_back() == 0
    assert pools[0].num_used == 1


def test_a_refused_extension_of_many_groups_reserves_nothing() -> None:
    groups = (group(0), group(1, window=4), group(2))
    pools = [BlockPool(8), BlockPool(8), BlockPool(2)]
    t = Table(groups, pools)
    t.extend(4)
    with pytest.raises(
        OutOfBlocks, match=r"9 more tokens after 4 need 3 blocks of group 2 \(4 positions each\) and 1 of 2"
    ):
        t.extend(9)
    assert [pool.num_used for pool in pools] == [1, 1, 1]
    assert [pool.free_ids()[0] for pool in pools] == [1, 1, 1]
    assert t.length == 4
    check(groups, pools, [t])


def test_a_ring_uses_its_own_blocks_again() -> None:
    ring = Ring(8, 3, 4, chunk=1)
    t, pools = table(group(window=5, addressing=ring))
    for _ in range(40):
        feed(t, 1)
        assert pools[0].num_used == ring.num_blocks
    held = t.held(0)
    assert t.entries(0)[0] == held[0]
    assert {b for b in t.entries(0)[1:] if b != GONE} <= set(held[1:])
    assert t.start(0) == 36
    check([group(window=5, addressing=ring)], pools, [t])


def test_a_ring_refuses_a_chunk_that_would_overwrite_its_own_window() -> None:
    t, _ = table(group(window=5, addressing=Ring(8, 3, 4, chunk=2)))
    t.extend(2)
    with pytest.raises(TooLong, match="3 tokens at once exceed the 2 that a ring of 8 rows has room for"):
        t.extend(1)
    t.commit(2)
    t.extend(2)


def test_contiguous_ends_at_its_capacity() -> None:
    t, _ = table(group(addressing=Contiguous(8)), blocks=1)
    feed(t, 8)
    with pytest.raises(TooLong, match="1 more tokens after 8 exceed a contiguous cache of 8 positions"):
        t.extend(1)


def test_truncating_gives_the_tail_back_first() -> None:
    t, pools = table(group())
    feed(t, 14)
    t.truncate(5)
    assert (t.length, t.written, list(t.entries(0))) == (5, 5, [0, 1])
    assert pools[0].free_ids()[-2:] == (3, 2)


def test_truncating_drops_places_that_were_never_committed() -> None:
    t, pools = table(group(window=4))
    for _ in range(9):
        feed(t, 1)
    t.extend(8)
    t.truncate(t.written)
    assert (t.length, t.written) == (9, 9)
    check([group(window=4)], pools, [t])


def test_truncating_a_window_is_refused_exactly_when_a_needed_row_is_gone() -> None:
    for written in range(1, 40):
        for length in range(written):
            t, pools = table(group(0), group(1, window=6))
            for _ in range(written):
                feed(t, 1)
            start, before = t.start(1), list(t.entries(1))
            if length > 0 and max(0, length - 5) < start:
                with pytest.raises(NotResident, match=f"from {written} to {length} tokens.*before {start}"):
                    t.truncate(length)
                assert (t.written, list(t.entries(1))) == (written, before)
            else:
                t.truncate(length)
                assert t.written == t.length == length
            check(t.groups, pools, [t])


def test_truncating_to_zero_empties_every_kind() -> None:
    groups = (group(0), group(1, window=4), group(2, window=5, addressing=Ring(8, 3, 4)))
    t, pools = table(*groups)
    for _ in range(30):
        feed(t, 1)
    t.truncate(0)
    assert (t.length, t.written) == (0, 0)
    assert [pool.num_used for pool in pools] == [0, 0, 0]
    feed(t, 1)
    assert [t.start(g) for g in range(3)] == [0, 0, 0]
    check(groups, pools, [t])


def test_releasing_twice_changes_nothing() -> None:
    t, pools = table(group())
    feed(t, 9)
    t.release()
    free = pools[0].free_ids()
    t.release()
    assert pools[0].free_ids() == free
    assert pools[0].num_used == 0


@pytest.mark.parametrize("act", ["extend", "needed", "truncate"])
def test_negative_numbers_are_refused(act: str) -> None:
    t, _ = table(group())
    feed(t, 3)
    with pytest.raises(UsageError, match="0 or more"):
        getattr(t, act)(-5)
    assert t.length == 3


def test_tables_refuse_what_they_cannot_keep() -> None:
    with pytest.raises(UsageError, match="recurrent state"):
        Table([Group(0, (0,), Layout(State(8), FLOAT32, Paged(4)))], [BlockPool(1)])
    with pytest.raises(UsageError, match="1 groups need as many block pools, not 2"):
        Table([group()], [BlockPool(1), BlockPool(1)])


@pytest.mark.parametrize("window", [1, 2, 4, 5, 6, 8, 9])
@pytest.mark.parametrize("chunk", [1, 3, 4, 7])
def test_the_bound_on_blocks_is_kept_and_reached(window: int, chunk: int) -> None:
    g = group(window=window)
    peak = 0
    for lead in range(4):
        t, pools = table(g, blocks=60)
        done = 0
        for n in [1] * lead + [chunk] * 12:
            done += n
            assert t.needed(n)[0] + pools[0].num_used <= g.blocks_for(done, chunk)
            t.extend(n)
            peak = max(peak, pools[0].num_used)
            t.commit(n)
            t.give_back()
    assert peak == g.blocks_for(1000, chunk)


def test_a_long_prompt_passes_through_a_window_that_full_attention_could_not_hold() -> None:
    window = group(window=9)
    t, pools = table(window, blocks=window.blocks_for(1000, 8))
    for _ in range(125):
        feed(t, 8)
    assert (t.written, pools[0].num_blocks) == (1000, 5)
    full, _ = table(group(), blocks=5)
    with pytest.raises(OutOfBlocks, match=r"24 more tokens after 0 need 6 blocks of group 0 .* and 5 of 5 are free"):
        full.extend(24)


def test_new_blocks_are_never_blocks_that_the_request_already_has() -> None:
    t, _ = table(group(), blocks=6)
    other = Table(t.groups, t._pools)
    feed(t, 6)
    feed(other, 4)
    feed(t, 6)
    other.release()
    feed(t, 12)
    assert sorted(t.entries(0)) == [0, 1, 2, 3, 4, 5]


def test_a_ring_forgets_what_it_overwrites_even_when_nobody_asked_it_to() -> None:
    ring = group(window=5, addressing=Ring(8, 3, 4, chunk=1))
    t, pools = table(ring)
    for _ in range(40):
        t.extend(1)
        t.commit(1)
        check([ring], pools, [t])
        stored = [block for block in t.entries(0) if block != GONE]
        assert len(set(stored)) == len(stored)
    assert t.start(0) > 0
