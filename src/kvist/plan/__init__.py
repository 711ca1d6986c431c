"""What a model's cache costs, here and in the engines people run. No torch.

The room and the verb have one name: ``kvist.plan(...)`` is ``kvist.plan.plan.plan(...)``.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    """A module that can be called."""

    def __call__(self, model: Any, **options: Any) -> Any:
        """The plan of ``model``; see ``kvist.plan.plan.plan``."""
        from kvist.plan.plan import plan

        return plan(model, **options)


sys.modules[__name__].__class__ = _Room
