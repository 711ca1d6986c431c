"""Backends that do one thing wrong, operation by operation, and the rows of a verification that ran on them."""

from __future__ import annotations

from collections.abc import Callable

from kvist.base.dtypes import FLOAT32, DType
from kvist.kernels.native import NativeBackend, NativeExecutor, variants
from kvist.kernels.ops import Op, Step
from kvist.verify.course import Subject
from kvist.verify.laws import Laws, paths
from kvist.verify.report import LawRow
from kvist.verify.value import check_value
from random_models import Kind, random_tokens, subject_of

LENGTH = 300
TOKENS = random_tokens(LENGTH)

# Does the operation (or not) on its own: (backend, op, step, run it natively on this step) -> handled.
Fault = Callable[[NativeBackend, Op, Step, Callable[[Step], None]], bool]


class FaultyExecutor(NativeExecutor):
    def __init__(self, backend: FaultyBackend, ops: list[Op]) -> None:
        super().__init__(backend, ops)
        self.backend = backend

    def run_range(self, step: Step, first: int, last: int) -> None:
        for i in range(first, last):

            def native(step: Step, i: int = i) -> None:
                NativeExecutor.run_range(self, step, i, i + 1)

            if not self.backend.fault(self.backend, self.ops[i], step, native):
                native(step)


class FaultyBackend(NativeBackend):
    fault: Fault

    def compile(self, ops: list[Op], **settings: object) -> NativeExecutor:
        return FaultyExecutor(self, ops)


def faulty(fault: Fault, kind: Kind | None = None, dtype: DType = FLOAT32) -> Subject:
    class Backend(FaultyBackend):
        pass

    Backend.fault = staticmethod(fault)
    return subject_of(kind or Kind(), dtype, Backend(variants()[0], 1))


def rows(subject: Subject, *names: str) -> dict[str, LawRow]:
    """The rows called ``names`` (all of them when none is named), and the judge's."""
    laws = Laws(subject, TOKENS)
    found = [laws.check(path) for path in paths(subject.spec, LENGTH, full=False) if not names or path.name in names]
    found.append(check_value(subject, TOKENS, list(range(0, LENGTH, 13))))
    return {row.path: row for row in found}


def failing(found: dict[str, LawRow]) -> set[str]:
    return {name for name, row in found.items() if not row.holds}
