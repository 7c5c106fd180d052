"""A layer's backward in two parts: B makes the gradient of its input, and W those of its weights when there is time.

Nearly all the work of W is products of two tensors: the gradient of an operator's output, and the operator's input. In
a forward whose backward is to be split, such an operator is replaced by an autograd function of ours. In B this
function computes only the gradient of its input, and keeps the gradient of its output. W computes the product (Qi et
al., 2024, "Zero Bubble Pipeline Parallelism"; they have autograd compute it, which keeps the graph). Everything else
that needs a gradient (norms, biases that are added separately, any module of the user's) is differentiated in B as
usual, and the gradients are kept until W.

The products are those that autograd would compute, on the same operands, so the bits should be the same. Whether they
are is checked for each kind of layer before the first step (`worker.model_check`). If they are not, the backward of the
layer stays whole. But the layer's code may take other branches later. So an operator is put off only in the one form
whose formula is known: with operands of torch's own type, with contiguous rows, and without autocast. A weight that is
used in another way as well, or that has hooks, gets its gradient in B, where autograd adds the parts in its own order.
It is an error if an operand is changed in place before W, or if the function is to be differentiated again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn


class PutOff(Protocol):
    """The second part of the backward of one layer and micro-batch."""

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """All tensors that are kept until the second part has run; () if nothing is put off."""
        ...

    def gradients(self, parameters: Sequence[nn.Parameter], others: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Makes the gradients of a layer's parameters. May be called once.

        Args:
            others: for each parameter the gradient that the first part has made, or None.
        """
        ...


class _Form(NamedTuple):
    """The computations of one kind of operator with a weight product.

    They get all values as arguments, since making closures in each call would take time.

    Args:
        run: (input, weight, bias, options) -> the operator's output.
        of_input: (gradient of the output, shape of the input, operand, weight, options) -> gradient of the input.
        of_weights: (gradient of the output, operand, options) -> gradients of the parameters.
        in_rows: True if the gradient of the output and the operand are matrices, with all dims but the last joined.
    """

    run: Callable[[Tensor, Tensor, Tensor | None, Any], Tensor]
    of_input: Callable[[Tensor, torch.Size, Tensor, Tensor, Any], Tensor]
    of_weights: Callable[[Tensor, Tensor, Any], tuple[Tensor, Tensor | None]]
    in_rows: bool


class _Product(NamedTuple):
    """A weight product.

    Args:
        form: the computations of the operator.
        parameters: the parameters whose gradients W makes: the weight, and a bias or None.
        operand: the operator's input, which W needs beside the gradient of the output.
        version: the version counter of the operand, by which a later change in place is detected.
        shape: the shape of the input.
        bias_in_b: True if B makes the gradient of the bias. It is the gradient of the output, which autograd sums up to
            the shape of the bias.
        options: the other arguments of the operator.
    """

    form: _Form
    parameters: tuple[nn.Parameter, nn.Parameter | None]
    operand: Tensor
    version: int
    shape: torch.Size
    bias_in_b: bool
    options: Any


class _PutOff(torch.autograd.Function):
    """An operator whose weight product is put off.

    It is not a hook on the output of torch's own operator, because the layer may change that output in place. Then the
    hook would be lost, and the product with it.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: _Product, products: WeightProducts
    ) -> Tensor:
        ctx.product, ctx.products = product, products
        ctx.set_materialize_grads(False)
        y = product.form.run(x, weight, bias, product.options)
        # The output of torch's linear may be a view, and autograd allows no change in place of a view that a function
        # of ours returns.
        return torch.ops.aten._unsafe_view.default(y, y.shape) if y._is_view() else y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        product: _Product = ctx.product
        products: WeightProducts = ctx.products
        (dy,) = grads
        if dy is None:
            return (None,) * 5
        if products.in_forward or torch.is_grad_enabled():
            raise RuntimeError("the weight gradients of this layer are put off: its forward cannot be differentiated")
        form, parameters, operand, version, shape, bias_in_b, options = product
        if operand._version != version:
            refuse_change(operand, version)
        if form.in_rows:
            dy = _rows(dy)
        dx = form.of_input(dy, shape, operand, parameters[0], options)
        of_bias = dy if bias_in_b else None
        if products.can_wait(parameters) and not products.is_of_parameters(dy):
            products.brought.append(_Brought(product, dy, dy._version))
            return dx, None, of_bias, None, None
        of_weight, with_it = form.of_weights(dy, operand, options)
        return dx, of_weight, with_it if of_bias is None else of_bias, None, None


def refuse_change(tensor: Tensor, version: int) -> None:
    """Refuse a tensor that was changed in place since it was kept, as autograd does for tensors that it saves.

    Raises:
        RuntimeError: the version counter of the tensor is not `version`.
    """
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor {list(tensor.shape)} of a weight gradient that was put off"
        )


class _Brought(NamedTuple):
    """A product with the gradient of the operator's output, and the version counter of that gradient."""

    product: _Product
    dy: Tensor
    version: int

    def gradients(self) -> tuple[Tensor, Tensor | None]:
        """The gradients of the product's parameters."""
        product, dy, version = self
        refuse_change(dy, version)
        refuse_change(product.operand, product.version)
        return product.form.of_weights(dy, product.operand, product.options)


@dataclass
class WeightProducts:
    """The weight products of one layer and micro-batch, put off until W.

    Args:
        storages: the storages of the layer's weights, by address.
        brought: the products that B has put off, in this order, with the gradients of the outputs.
        used_otherwise: the ids of parameters that were also used by an operator without a weight product.
        in_forward: True until the forward is over.
    """

    storages: frozenset[int] = frozenset()
    brought: list[_Brought] = field(default_factory=list)
    used_otherwise: set[int] = field(default_factory=set)
    in_forward: bool = False

    def can_wait(self, parameters: tuple[nn.Parameter, nn.Parameter | None]) -> bool:
        """True if the gradients of the parameters consist of weight products alone, and no hook needs them in B."""
        for one in parameters:
            if one is None:
                continue
            if id(one) in self.used_otherwise or one._backward_hooks or one._post_accumulate_grad_hooks:
                return False
        return True

    def is_of_parameters(self, tensor: Tensor) -> bool:
        """True if a tensor lies in the memory of the layer's weights."""
        return tensor.untyped_storage()._cdata in self.storages

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """All tensors that are kept until W."""
        return tuple(tensor for one in self.brought for tensor in (one.product.operand, one.dy))

    def gradients(self, parameters: Sequence[nn.Parameter], others: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run W, and return the gradients of a layer's parameters.

        Args:
            others: for each parameter the gradient that B has made, or None.

        Raises:
            RuntimeError: an operand was changed in place, or the gradient of a parameter is a sum of parts whose order
                only autograd knows.
        """
        found: dict[int, Tensor] = {}
        several: set[int] = set()
        for one in self.brought:
            for parameter, gradient in zip(one.product.parameters, one.gradients(), strict=True):
                if parameter is None or gradient is None:
                    continue
                before = found.get(id(parameter))
                if before is not None:
                    gradient = before + gradient
                    several.add(id(parameter))
                found[id(parameter)] = gradient
        self.brought.clear()
        together = []
        for parameter, other in zip(parameters, others, strict=True):
            own = found.get(id(parameter))
            if own is not None and other is not None and id(parameter) in several:
                # In floating point a + (b + c) is not (a + b) + c. The order of only two parts does not matter.
                raise RuntimeError("a parameter has several weight gradients that were put off, and one that was not")
            together.append(other if own is None else own if other is None else other + own)
        return together


class SplitLayer:
    """A layer whose forwards can put off the weight products of their backward.

    Args:
        parameters: the trained parameters of the layer. Those with two or more dims may be the weight of a product, and
            are `SplitParameter`s within `putting_off`. At all other times they are plain parameters: in a validation,
            where torch takes other paths if parameters are of a subclass, and in a backward. A parameter that is of a
            subclass already, such as a tensor that wraps another one, handles operators itself, and is left alone.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._weights = [one for one in parameters if one.dim() >= 2 and type(one) is nn.Parameter]
        # Their memory may be freed and allocated again (ZeRO-3), but the storages stay the same.
        self._storages = frozenset(one.untyped_storage()._cdata for one in self._weights)

    @contextmanager
    def putting_off(self) -> Iterator[WeightProducts]:
        """Context for a forward whose backward puts off weight products. Yields the record of these."""
        products = WeightProducts(self._storages, in_forward=True)
        for parameter in self._weights:
            parameter.__class__ = SplitParameter
            vars(parameter)["products"] = products
        try:
            yield products
        finally:
            products.in_forward = False
            for parameter in self._weights:
                parameter.__class__ = nn.Parameter
                del vars(parameter)["products"]


class SplitParameter(nn.Parameter):
    """A parameter that recognises operators with a weight product. Only operators that take it are slowed down."""

    products: WeightProducts

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        put_off = _OPERATORS.get(func)
        if put_off is not None and torch.is_grad_enabled() and len(types) == 1:
            with torch._C.DisableTorchFunctionSubclass():
                output = put_off(*args, **(kwargs or {}))
            if output is not None:
                return output
        output = super().__torch_function__(func, types, args, kwargs or {})
        # If the output is the parameter itself, it was not used.
        if _has_tensor(output) and not isinstance(output, SplitParameter):
            for parameter in _split_parameters((args, kwargs)):
                parameter.products.used_otherwise.add(id(parameter))
        return output


def _has_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, list | tuple) and any(_has_tensor(one) for one in value))


def _split_parameters(value: Any) -> Iterator[SplitParameter]:
    """The parameters within the arguments of an operator."""
    if isinstance(value, SplitParameter):
        yield value
    elif isinstance(value, list | tuple | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _split_parameters(one)


def _products_of(input: Tensor, weight: object) -> WeightProducts | None:
    """The record in which the product of an input and a weight is put off; None if it must not be put off."""
    if not isinstance(weight, SplitParameter) or not weight.requires_grad:
        return None
    if type(input) is not Tensor or not input.requires_grad or input.dtype is not weight.dtype:
        return None
    # If the input is part of a parameter, its memory may be freed before W (ZeRO-3).
    products = weight.products
    if products.is_of_parameters(input):
        return None
    # Autocast computes with converted operands.
    return None if torch.is_autocast_enabled(input.device.type) else products


def _has_plain_rows(tensor: Tensor) -> bool:
    """True if a tensor has plain strides and two or more dims. For other strides torch may choose other kernels."""
    if tensor.is_contiguous() and min(tensor.shape) > 1:
        return tensor.dim() >= 2
    elements = 1  # a contiguous tensor may have any strides if a dim has one element, or none
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != elements:
            return False
        elements *= max(size, 1)
    return tensor.dim() >= 2


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    products = _products_of(input, weight)
    if products is None or not _has_plain_rows(input) or (bias is not None and bias.dim() != 1):
        return None
    assert isinstance(weight, nn.Parameter)
    # B makes the gradient of the bias. That sum over rows costs little, and the bias may be any tensor, such as part of
    # a parameter or something computed from parameters.
    bias_in_b = bias is not None and bias.requires_grad
    x = _rows(input.detach())
    product = _Product(_LINEAR, (weight, None), x, x._version, input.shape, bias_in_b, None)
    return _PutOff.apply(input, weight, bias, product, products)


_LINEAR = _Form(
    run=lambda x, w, b, _: torch.nn.functional.linear(x, w, b),
    of_input=lambda dy, shape, x, w, _: dy.mm(w).view(shape),
    of_weights=lambda dy, x, _: (dy.t().mm(x), None),
    in_rows=True,
)


def _matmul(input: Tensor, other: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    products = _products_of(input, other)
    if products is None or kwargs or not _has_plain_rows(input):
        return None
    assert isinstance(other, nn.Parameter)
    if other.dim() != 2:
        return None
    x = _rows(input.detach())
    product = _Product(_MATMUL, (other, None), x, x._version, input.shape, False, None)
    return _PutOff.apply(input, other, None, product, products)


_MATMUL = _Form(
    run=lambda x, w, b, _: torch.matmul(x, w),
    of_input=lambda dy, shape, x, w, _: dy.mm(w.t()).view(shape),
    of_weights=lambda dy, x, _: (x.t().mm(dy), None),
    in_rows=True,
)


def _mm(input: Tensor, mat2: Tensor, **kwargs: Any) -> Tensor | None:
    return _matmul(input, mat2, **kwargs)


def _rows(tensor: Tensor) -> Tensor:
    """The tensor as a matrix: all dims but the last are joined."""
    return tensor.reshape(-1, tensor.shape[-1])


def _convolution(
    operator: Callable[..., Tensor],
    dims: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    products = _products_of(input, weight)
    if products is None or isinstance(padding, str) or input.dim() != dims + 2:
        return None
    assert isinstance(weight, nn.Parameter)
    # The gradient of the bias is made together with that of the weight, so the bias must be a parameter.
    graded = bias if isinstance(bias, nn.Parameter) and bias.requires_grad else None
    if bias is not None and bias.requires_grad and graded is None:
        return None
    x = input.detach()
    options = _ConvolutionOptions(
        operator,
        (stride, padding, dilation, groups),
        (*(_of_each_dim(option, dims) for option in (stride, padding, dilation)), False, [0] * dims, groups),
        (weight.shape, weight.stride()),
        graded is not None,
    )
    product = _Product(_CONVOLUTION, (weight, graded), x, x._version, x.shape, False, options)
    return _PutOff.apply(input, weight, bias, product, products)


def _of_each_dim(value: Any, dims: int) -> list[int]:
    """An option of a convolution as torch's backward takes it: one number for each dim."""
    return [value] * dims if isinstance(value, int) else list(value)


class _ConvolutionOptions(NamedTuple):
    """The options of a convolution beside its tensors, in the forms of its operator and of torch's backward.

    Args:
        operator: torch's function.
        forward, backward: the options in the form that the function, or torch's backward of it, takes.
        weight: the shape and strides of the weight.
        has_bias: True if W makes the gradient of a bias.
    """

    operator: Callable[..., Tensor]
    forward: tuple[Any, ...]
    backward: tuple[Any, ...]
    weight: tuple[torch.Size, tuple[int, ...]]
    has_bias: bool


def _input_of_convolution(dy: Tensor, shape: torch.Size, x: Tensor, w: Tensor, given: _ConvolutionOptions) -> Tensor:
    return torch.ops.aten.convolution_backward(dy, x, w, None, *given.backward, [True, False, False])[0]


def _weights_of_convolution(dy: Tensor, x: Tensor, given: _ConvolutionOptions) -> tuple[Tensor, Tensor | None]:
    shape, strides = given.weight
    sizes = [shape[0]] if given.has_bias else None
    # Only the shape and strides of the weight matter here. Its values may be gone by now (ZeRO-3).
    form = torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device)
    wanted = [False, True, given.has_bias]
    _, of_weight, of_bias = torch.ops.aten.convolution_backward(dy, x, form, sizes, *given.backward, wanted)
    return of_weight, of_bias if given.has_bias else None


_CONVOLUTION = _Form(
    run=lambda x, w, b, given: given.operator(x, w, b, *given.forward),
    of_input=_input_of_convolution,
    of_weights=_weights_of_convolution,
    in_rows=False,
)


def _conv1d(*args: Any, **kwargs: Any) -> Tensor | None:
    return _convolution(torch.conv1d, 1, *args, **kwargs)


def _conv2d(*args: Any, **kwargs: Any) -> Tensor | None:
    return _convolution(torch.conv2d, 2, *args, **kwargs)


def _conv3d(*args: Any, **kwargs: Any) -> Tensor | None:
    return _convolution(torch.conv3d, 3, *args, **kwargs)


_OPERATORS: dict[Callable[..., Any], Callable[..., Tensor | None]] = {
    torch.nn.functional.linear: _linear,
    torch.matmul: _matmul,
    torch.mm: _mm,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    torch.conv1d: _conv1d,
    torch.conv2d: _conv2d,
    torch.conv3d: _conv3d,
}
"""Operator with a weight product -> the function that runs it and puts the product off. It returns None if it may not
do so."""
