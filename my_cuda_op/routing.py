"""Which of its implementations a call of an operator runs: a kernel, a ``torch.autograd.Function`` around it, or the
reference."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.compiler import is_compiling
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type

from my_cuda_op import _C, reference

_transforms_active = torch._C._are_functorch_transforms_active
_Transform = torch._C._functorch.TransformType

_kernels = False  # does compiled code run the kernels? Dynamo guards it, so that a change recompiles


class compile_with:
    """Choose what ``torch.compile`` and ``torch.export`` make of the operators: for good, in a ``with`` block, or in
    the calls of a function that it decorates.

    ``"decomposition"``, the default: the operators in plain PyTorch, which Inductor fuses with what stands around them.
    ``"kernels"``: the kernels of this package, forward and backward. They stand in the graph as
    ``torch.ops.my_cuda_op.*``, and nothing is fused with them::

        my_cuda_op.compile_with("kernels")  # from here on
        with my_cuda_op.compile_with("kernels"):  # or in here
            compiled_model(x)
        @my_cuda_op.compile_with("kernels")  # or in each call
        def step(x): ...

    As ``torch.set_grad_enabled``, it acts where it is called, and what was chosen before that comes back where a block
    ends. What counts is the choice where compiled code is called, not where ``torch.compile`` is. Code is compiled once
    for each choice, and an exported program keeps the one that it was exported with; with kernels it needs
    ``import my_cuda_op`` where it is loaded. There is one choice for all threads.

    With ``"kernels"``, too, what is under a transform of torch.func, dual numbers, and tensors that wrap others, as
    DTensor does, get the decomposition, and an operator in place writes into a new tensor first. A float that changes
    from call to call compiles anew for each value, as with any operator that Inductor does not know; a tensor of one
    element does not.

    Args:
        implementation: ``"decomposition"`` or ``"kernels"``.

    Raises:
        ValueError: it is neither.
    """

    def __init__(self, implementation: str) -> None:
        global _kernels
        if implementation not in ("decomposition", "kernels"):
            raise ValueError(
                f"compile_with: implementation must be 'decomposition' or 'kernels', got {implementation!r}"
            )
        self.implementation, self.before = implementation, _kernels
        _kernels = implementation == "kernels"

    def __call__(self, function: Callable) -> Callable:
        global _kernels
        _kernels = self.before  # the choice is one for the calls, not for what follows the decorator

        @functools.wraps(function)
        def chosen(*args: Any, **kwargs: Any) -> Any:
            with compile_with(self.implementation):
                return function(*args, **kwargs)

        return chosen

    def __enter__(self) -> None:
        global _kernels
        _kernels = self.implementation == "kernels"

    def __exit__(self, *error: Any) -> None:
        global _kernels
        _kernels = self.before


class Operator:
    """An operator as Python calls it: its kernels and its reference, and when which of them runs.

    A plain call runs the kernel, and is recorded where a derivative is needed (see csrc/autograd.h); so does a call
    with fake tensors, or under a mode. Any other, with a subclass or a dual number, or under a transform of torch.func,
    runs the reference, whose derivatives are PyTorch's own. Compiled code runs what :class:`compile_with` says.

    Args:
        name: of the dispatcher's operators, of the functions of ``_C`` and of the reference.
        function: its derivative; None for an operator that runs the reference where one is needed.
        saves_input: does a derivative by a parameter need the input?
    """

    def __init__(self, name: str, function: type[Function] | None = None, saves_input: bool = False) -> None:
        self.name, self.function, self.saves_input = name, function, saves_input
        self.plain: Callable[..., Tensor | None] = getattr(_C.plain, name)  # None, with nothing done, where not plain
        self.kernel_: Callable[..., None] | None = getattr(_C, name + "_", None)  # in place
        self.op: Callable[..., Tensor] = getattr(torch.ops.my_cuda_op, name)
        self.reference: Callable[..., Tensor] = getattr(reference, name)
        if function is not None:
            _C.set_derivative(name, function)
            self.eager = _eager(function)

    def __call__(self, *args: Any) -> Tensor:
        """The result, with its derivative recorded where one is needed."""
        if is_compiling():
            return self.compiled(*args)
        if (output := self.plain(*args)) is not None:
            return output
        return self.derived(*args)

    def compiled(self, *args: Any) -> Tensor:
        """What a compiler traces. Never a Function: Dynamo refuses one that has a jvp."""
        return self.op(*args) if _kernels and not _wraps(args) else self.reference(*args)

    def derived(self, *args: Any) -> Tensor:
        """What runs where a call is not plain."""
        if _wraps(args) or torch._C._is_tracing() or _transforms_active() or _is_batched(args) or _is_dual(args):
            return self.reference(*args)
        if not _requires_grad(args):
            return self.kernel(*args)
        return self.reference(*args) if self.function is None else self.eager.apply(*args)

    record = derived  # what the dispatcher's operator does where autograd is to see it

    def kernel(self, *args: Any) -> Tensor:
        """The kernel, or what a mode or a subclass makes of the operator."""
        with torch._C._AutoDispatchBelowAutograd():
            return self.op(*args)

    def in_place(self, input: Tensor, *args: Any) -> Tensor:
        """The same in place: changes the input and returns it."""
        if (
            is_compiling()
            or _wraps((input, *args))
            or torch._C._is_tracing()
            or _transforms_active()
            or forward_ad._current_level >= 0
            or _requires_grad(args)
        ):
            self.assign(self, input, *args)
        elif _requires_grad((input,)):
            _C.check_inplace(input)  # before anything changes: mark_dirty would check afterwards
            self.record_in_place(input, *args)
        else:
            self.kernel_(input, *args)
        return input

    def record_in_place(self, input: Tensor, *args: Any) -> None:
        self.assign(self, input, *args)

    def assign(self, function: Callable[..., Tensor], input: Tensor, *args: Any) -> None:
        """``input.copy_(function(input, *args))``, where function is this operator or its reference."""
        # Where the derivative needs the old input stock PyTorch fails in backward; a copy costs memory, and works.
        copy = self.saves_input and any(isinstance(arg, Tensor) for arg in args)
        output = function(input.clone() if copy else input, *args)
        if not reference.can_cast(output.dtype, input.dtype):
            raise RuntimeError(
                f"{self.name}_: the result type must be one that input's dtype {input.dtype} can hold, "
                f"got {output.dtype}"
            )
        input.copy_(output)


class Transformable(Operator):
    """An operator whose Function has a jvp, too: its kernel also runs where a call is not plain."""

    def __init__(self, name: str, function: type[Function], saves_input: bool = False) -> None:
        super().__init__(name, function, saves_input)
        self.eager_ = _in_place(function, self.kernel_)
        function.vmap = _vmap(self.reference)

    def derived(self, *args: Any) -> Tensor:
        if _wraps(args) or _runs_reference():
            return self.reference(*args)
        if _transforms_active():
            return self.function.apply(*args)
        if _is_dual(args) or _requires_grad(args):
            return self.eager.apply(*args)
        return self.kernel(*args)

    def record(self, *args: Any) -> Tensor:
        return self.eager.apply(*args)

    def record_in_place(self, input: Tensor, *args: Any) -> None:
        self.eager_.apply(input, *args)


def _runs_reference() -> bool:
    """Where a Function is not enough: torch.jit.trace records it as an opaque call of Python; functionalize refuses it;
    and in forward mode inside forward mode its jvp sees what it saved without the outer tangents."""
    if torch._C._is_tracing():
        return True
    if not _transforms_active():
        return False
    keys = [level.key() for level in torch._C._functorch.get_interpreter_stack()]
    return _Transform.Functionalize in keys or keys.count(_Transform.Jvp) > 1


def _wraps(args: tuple) -> bool:
    """Is there a tensor that wraps others, as DTensor does? It knows what to do with those for PyTorch's operators, and
    not for ours; so the reference runs. (Asked of the type, which Dynamo traces rightly, unlike the tensor's own; but
    torch 2.11's does not trace what it knows of DTensor.)"""
    if torch.compiler.is_dynamo_compiling():
        return any(isinstance(arg, Tensor) and type(arg) not in (Tensor, torch.nn.Parameter) for arg in args)
    return any(isinstance(arg, Tensor) and is_traceable_wrapper_subclass_type(type(arg)) for arg in args)


def _is_batched(args: tuple) -> bool:
    """By torch.autograd.grad(is_grads_batched=True), which is no transform of torch.func."""
    return any(isinstance(arg, Tensor) and torch._C._functorch.is_legacy_batchedtensor(arg) for arg in args)


def _is_dual(args: tuple) -> bool:
    return any(isinstance(arg, Tensor) and _C.is_dual(arg) for arg in args)


def _requires_grad(args: tuple) -> bool:
    enabled = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()  # enable_grad in there changes nothing
    return enabled and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)


def _eager(function: type[Function]) -> type[Function]:
    """The same Function with the context in ``forward``: ``setup_context`` costs an inspect.signature a call."""

    def forward(ctx, *args):
        output = function.forward(*args)
        function.setup_context(ctx, args, output)
        return output[0] if isinstance(output, tuple) else output  # without the mask

    return _derive(function, forward)


def _in_place(function: type[Function], kernel_: Callable[..., None]) -> type[Function]:
    """The same Function, overwriting its input. For a derivative that does not need the old input."""

    def forward(ctx, input, *args):
        kernel_(input, *args)
        ctx.mark_dirty(input)
        function.setup_context(ctx, (input, *args), input)
        return input

    return _derive(function, forward)


def _derive(function: type[Function], forward: Callable[..., Tensor]) -> type[Function]:
    members = {"forward": staticmethod(forward), "setup_context": Function.setup_context, "__module__": __name__}
    return type(function)(function.__name__, (function,), members)


def _vmap(reference: Callable[..., Tensor]) -> staticmethod:
    """A vmap rule: PyTorch batches the reference, whichever arguments are batched."""

    def vmap(info, in_dims, *args):
        return torch.vmap(reference, in_dims, randomness=info.randomness)(*args), 0

    return staticmethod(vmap)
