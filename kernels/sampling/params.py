"""SamplingTensors: how each row of a step wants its next token, as the sampling kernels read it."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from kernels.checks import require, require_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingTensors:
    """Resolved parameters of the rows to sample, parallel tensors [rows].

    A row of negative temperature is padding: nothing is computed for it and nothing written.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    choice: Tensor
    position: Tensor

    def __post_init__(self) -> None:
        shape = tuple(self.temperature.shape)
        require(len(shape) == 1, "temperature", "must have 1 dimension")
        for name in ("temperature", "top_p", "min_p"):
            require_ids(getattr(self, name), name, dtype=torch.float32, shape=shape)
        for name in ("top_k", "seed", "choice", "position"):
            require_ids(getattr(self, name), name, dtype=torch.int64, shape=shape)

    def rows(self, index: Tensor) -> "SamplingTensors":
        """The parameters of some rows."""
        return SamplingTensors(**{one.name: getattr(self, one.name)[index] for one in fields(self)})
