"""Every collected report of a bug in other caches is a test here, or there is a reason why it cannot be one (yet)."""

from __future__ import annotations

from pathlib import Path

CASES = (
    *("b01", "b03", "b05", "b06", "b08", "b09", "b11", "b12", "b14", "b16", "b18", "b19", "b21", "b23", "b24", "b25"),
    *("b27", "b29", "b30", "b31", "b33", "b35", "b37", "b38", "b40", "b41", "b43", "b44", "b45", "b47", "b49", "b51"),
    *("b53", "b55", "b57", "b59"),
)
REASONS = {
    "b21": "beams are not reordered: there is no beam search",
    "b23": "rows of another request are found by comparing its tokens, never by a digest; digests come with a store",
    "b24": "weights, adapters and cache belong to one process and cannot be exchanged in it",
    "b25": "there is no lower tier and no tenant",
    "b29": "no cache format has groups: float32, bfloat16 and float16 are stored element by element",
    "b30": "as b29: nothing is quantised later than it is stored",
    "b31": "as b29: no scale is shared between channels",
    "b37": "sessions cannot be saved",
    "b38": "sessions cannot be saved",
    "b45": "nobody is preempted: a request is admitted when every block it can ever hold is free (scheduler)",
    "b57": "there is no store beside the pool",
}


def test_a_file_or_a_reason_for_each() -> None:
    names = {path.stem.split("_")[1] for path in Path(__file__).parent.glob("test_b*.py")}
    assert names <= set(CASES), "a test of an unknown case"
    assert not names & set(REASONS), "there is a test now: drop the reason"
    assert names | set(REASONS) == set(CASES)
