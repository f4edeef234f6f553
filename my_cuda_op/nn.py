"""The operators as layers: they hold state and call :mod:`my_cuda_op.functional`.

A parameter of an operator (``factor``, ``value``) is held as

* the Python number itself, exact in every dtype, where it is a number: no buffer, nothing in the ``state_dict``;
* an ``nn.Parameter`` named ``weight`` or ``bias`` with ``learnable=True`` (shape ``(1,)``) or ``num_channels=C`` (shape
  ``(C,)``), or where it is one: the same object, unless ``device`` or ``dtype`` change it. A tensor that requires grad
  is copied into one. ``learnable=False`` makes either a buffer;
* a buffer of that name where it is a tensor and not learnable, or with ``num_channels=C, learnable=False``.
"""

from __future__ import annotations

import operator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from my_cuda_op import functional as F

__all__ = ["AddScalar", "ReLU", "Scale", "ScaleAdd", "ScaleAddReLU"]


def _int(name: str, what: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):  # as a NumPy integer has
        raise TypeError(f"{name}: {what} must be an int, got {type(value).__name__}")
    return operator.index(value)


class _WithParameters(nn.Module):
    """What layers with parameters share. ``self.<state>`` is what they hand to the function."""

    arguments: ClassVar[dict[str, str]]  # "weight" and "bias", and the name of each in __init__

    def __init__(
        self,
        initial: tuple[F.Parameter, ...],
        num_channels: int | None,
        learnable: bool | None,
        dim: int,
        inplace: bool,
        device: Any,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if learnable is not None and not isinstance(learnable, bool):
            raise TypeError(f"{name}: learnable must be a bool or None, got {type(learnable).__name__}")
        num_channels = None if num_channels is None else _int(name, "num_channels", num_channels)
        dim = _int(name, "dim", dim)
        if num_channels is not None and num_channels < 1:
            raise ValueError(f"{name}: num_channels must be at least 1, got {num_channels}")
        self.num_channels, self.dim, self.inplace = num_channels, dim, inplace
        self.learnable = num_channels is not None if learnable is None else learnable
        self.initial: dict[str, F.Number] = {}
        for (state, argument), value in zip(self.arguments.items(), initial, strict=True):
            given = isinstance(value, nn.Parameter) or (isinstance(value, Tensor) and value.requires_grad)
            learns = self.learnable or (learnable is None and given)
            self._hold(state, argument, F.check_parameter(name, argument, value), learns, device, dtype)

    def _hold(
        self, state: str, argument: str, initial: F.Parameter, learns: bool, device: Any, dtype: torch.dtype | None
    ) -> None:
        if isinstance(initial, Tensor):
            held = initial.to(device=device, dtype=dtype)
            if not (learns and isinstance(initial, nn.Parameter) and held is initial):
                held = torch.atleast_1d(held.detach().clone())
            if held.dim() > 1 or self.num_channels not in (None, held.numel()):
                expected = f"({self.num_channels},)" if self.num_channels else "(), (1,) or (C,)"
                raise ValueError(
                    f"{type(self).__name__}: {argument} must have shape {expected}, got {tuple(initial.shape)}"
                )
        else:
            self.initial[state] = initial
            if not self.learnable and self.num_channels is None:
                setattr(self, state, initial)
                return
            dtype = dtype or torch.get_default_dtype()
            if isinstance(initial, complex) and not dtype.is_complex:
                raise TypeError(
                    f"{type(self).__name__}: {argument} must be real, for a dtype of {dtype}, got {initial}"
                )
            held = torch.full((self.num_channels or 1,), initial, device=device, dtype=dtype)
        if learns:
            frozen = isinstance(initial, nn.Parameter) and not initial.requires_grad
            setattr(self, state, held if held is initial else nn.Parameter(held, requires_grad=not frozen))
        else:
            self.register_buffer(state, held)

    def reset_parameters(self) -> None:
        """Fill with the number the layer was made with; one made from a tensor keeps what it holds."""
        for state, initial in self.initial.items():
            held = getattr(self, state)
            if isinstance(held, Tensor):
                with torch.no_grad():
                    held.fill_(initial)

    def extra_repr(self) -> str:
        held = {state: getattr(self, state) for state in self.arguments}
        parts = [f"{self.arguments[state]}={value}" for state, value in held.items() if not isinstance(value, Tensor)]
        channels = [value.numel() for value in held.values() if isinstance(value, Tensor)]
        if channels:
            learnable = self.learnable or any(isinstance(value, nn.Parameter) for value in held.values())
            parts += [f"num_channels={max(channels)}", f"learnable={learnable}", f"dim={self.dim}"]
        return ", ".join([*parts, "inplace=True"] if self.inplace else parts)


class Scale(_WithParameters):
    """``input * factor``. See :func:`my_cuda_op.functional.scale`.

    Args:
        factor: the number, the tensor, or what a learnable one starts from.
        num_channels: one factor for each of so many channels.
        learnable: train the factor; by default where ``num_channels`` is given, or the factor is an ``nn.Parameter``
            (which is then held itself) or a tensor that requires grad.
        dim: the channel dimension.
        inplace: overwrite the input.
        device, dtype: of the parameter or buffer, as in ``torch.nn``.
    """

    arguments: ClassVar = {"weight": "factor"}

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
        super().__init__((factor,), num_channels, learnable, dim, inplace, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        return F.scale(input, self.weight, dim=self.dim, inplace=self.inplace)


class AddScalar(_WithParameters):
    """``input + value``. See :func:`my_cuda_op.functional.add_scalar`; the arguments are those of :class:`Scale`."""

    arguments: ClassVar = {"bias": "value"}

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
        super().__init__((value,), num_channels, learnable, dim, inplace, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        return F.add_scalar(input, self.bias, dim=self.dim, inplace=self.inplace)


class ScaleAdd(_WithParameters):
    """``input * factor + value``, and ``+ residual`` where that is given to ``forward``.

    See :func:`my_cuda_op.functional.scale_add`; the arguments are those of :class:`Scale`.
    """

    arguments: ClassVar = {"weight": "factor", "bias": "value"}

    def __init__(
        self,
        factor: F.Parameter = 1.0,
        value: F.Parameter = 0.0,
        *,
        num_channels: int | None = None,
        learnable: bool | None = None,
        dim: int = 1,
        inplace: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__((factor, value), num_channels, learnable, dim, inplace, device, dtype)

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        return F.scale_add(input, self.weight, self.bias, residual=residual, dim=self.dim, inplace=self.inplace)


class ScaleAddReLU(ScaleAdd):
    """:class:`ScaleAdd`, and then the larger of that and 0. See :func:`my_cuda_op.functional.scale_add_relu`."""

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        return F.scale_add_relu(input, self.weight, self.bias, residual=residual, dim=self.dim, inplace=self.inplace)


class ReLU(nn.Module):
    """``max(input, 0)``. See :func:`my_cuda_op.functional.relu`."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.inplace = inplace

    def forward(self, input: Tensor) -> Tensor:
        return F.relu(input, inplace=self.inplace)

    def extra_repr(self) -> str:
        return "inplace=True" if self.inplace else ""
