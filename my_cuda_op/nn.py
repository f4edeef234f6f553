"""The operators as layers: they hold state and call :mod:`my_cuda_op.functional`.

A parameter of an operator (``factor``, ``value``) is held as

* the Python number itself, exact in every dtype, where it is a number: no buffer, nothing in the ``state_dict``;
* an ``nn.Parameter`` named ``weight`` or ``bias`` with ``learnable=True`` (shape ``(1,)``) or ``num_channels=C`` (shape
  ``(C,)``);
* a buffer of that name where it is a tensor and not learnable, or with ``num_channels=C, learnable=False``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from my_cuda_op import functional as F

__all__ = ["AddScalar", "ReLU", "Scale"]


class _WithParameter(nn.Module):
    """What layers with one parameter share. ``self.<state>`` is what they hand to the function."""

    state: str  # "weight" or "bias"
    argument: str  # its name in __init__

    def __init__(
        self,
        initial: F.Parameter,
        num_channels: int | None,
        learnable: bool | None,
        dim: int,
        inplace: bool,
        device: Any,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        initial = F.check_parameter(name, self.argument, initial)
        if num_channels is not None and num_channels < 1:
            raise ValueError(f"{name}: num_channels must be at least 1, got {num_channels}")
        self.num_channels, self.dim, self.inplace = num_channels, dim, inplace
        self.learnable = num_channels is not None if learnable is None else learnable
        self.initial = None if isinstance(initial, Tensor) else initial
        if isinstance(initial, Tensor):
            held = torch.atleast_1d(initial.detach().clone().to(device=device, dtype=dtype))
            if held.dim() != 1 or num_channels not in (None, held.numel()):
                expected = f"({num_channels},)" if num_channels else "(), (1,) or (C,)"
                raise ValueError(f"{name}: {self.argument} must have shape {expected}, got {tuple(initial.shape)}")
        elif self.learnable or num_channels is not None:
            held = torch.full((num_channels or 1,), initial, device=device, dtype=dtype or torch.get_default_dtype())
        else:
            setattr(self, self.state, initial)
            return
        if self.learnable:
            setattr(self, self.state, nn.Parameter(held))
        else:
            self.register_buffer(self.state, held)

    def reset_parameters(self) -> None:
        """Fill with the number the layer was made with; one made from a tensor keeps what it holds."""
        held = getattr(self, self.state)
        if isinstance(held, Tensor) and self.initial is not None:
            with torch.no_grad():
                held.fill_(self.initial)

    def extra_repr(self) -> str:
        held = getattr(self, self.state)
        if isinstance(held, Tensor):
            parts = [f"num_channels={held.numel()}", f"learnable={self.learnable}", f"dim={self.dim}"]
        else:
            parts = [f"{self.argument}={held}"]
        return ", ".join([*parts, "inplace=True"] if self.inplace else parts)


class Scale(_WithParameter):
    """``input * factor``. See :func:`my_cuda_op.functional.scale`.

    Args:
        factor: the number, the tensor, or what a learnable one starts from.
        num_channels: one factor for each of so many channels.
        learnable: train the factor; by default where ``num_channels`` is given.
        dim: the channel dimension.
        inplace: overwrite the input.
        device, dtype: of the parameter or buffer, as in ``torch.nn``.
    """

    state, argument = "weight", "factor"

    def __init__(
        self,
        factor: F.Parameter = 1.0,
        *,
        num_channels: int | None = None,
        learnable: bool | None = None,
        dim: int = 1,
        inplace: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(factor, num_channels, learnable, dim, inplace, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        return F.scale(input, self.weight, dim=self.dim, inplace=self.inplace)


class AddScalar(_WithParameter):
    """``input + value``. See :func:`my_cuda_op.functional.add_scalar`; the arguments are those of :class:`Scale`."""

    state, argument = "bias", "value"

    def __init__(
        self,
        value: F.Parameter = 0.0,
        *,
        num_channels: int | None = None,
        learnable: bool | None = None,
        dim: int = 1,
        inplace: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(value, num_channels, learnable, dim, inplace, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        return F.add_scalar(input, self.bias, dim=self.dim, inplace=self.inplace)


class ReLU(nn.Module):
    """``max(input, 0)``. See :func:`my_cuda_op.functional.relu`."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.inplace = inplace

    def forward(self, input: Tensor) -> Tensor:
        return F.relu(input, inplace=self.inplace)

    def extra_repr(self) -> str:
        return "inplace=True" if self.inplace else ""
