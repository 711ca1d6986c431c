"""From a step's arrays to the logits it wants, through the decoder."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvist.base.errors import KernelError
from kvist.kernels.ops import Step


class Forward(Protocol):
    """What a runner needs of a decoder."""

    @property
    def max_tokens(self) -> int:
        """The most tokens of one step."""
        ...

    def forward(self, step: Step) -> Tensor:
        """Logits float32 [R, vocab] of ``step.rows``; rows of the step's tokens are stored in the pool on the way."""
        ...


class Runner:
    """Calls the decoder and hands its logits to the host."""

    def __init__(self, decoder: Forward) -> None:
        """Run ``decoder``, which owns its weights and knows its pool."""
        self.decoder = decoder

    @property
    def max_tokens(self) -> int:
        """The most tokens of one step."""
        return self.decoder.max_tokens

    def run(self, step: Step) -> NDArray[np.float32]:
        """Logits [R, vocab]: a view that the next run overwrites. KernelError when the decoder breaks its contract."""
        logits = self.decoder.forward(step)
        if logits.ndim != 2 or logits.shape[0] != len(step.rows):
            raise KernelError(f"the decoder returned logits {list(logits.shape)} for {len(step.rows)} wanted rows")
        host: NDArray[np.float32] = logits.numpy(force=True)
        return host
