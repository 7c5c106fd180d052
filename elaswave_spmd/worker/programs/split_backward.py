"""A layer's backward in two parts: B makes the gradient of its input, W those of its weights when there is time.

Nearly all the work of W are products of two tensors: the gradient of an operator's output, and its input. In a forward
whose backward is to be split, such an operator is an autograd function of ours, which in B gives the gradient of its
input alone, and keeps that of its output. W is the product (Qi et al., 2024, "Zero Bubble Pipeline Parallelism"; there
by autograd, which keeps the graph). What else needs a gradient (norms, biases that are added by themselves, any module
of the user's) is differentiated in B as ever, and kept.

The products are those that autograd would call, on the same operands, so the bits should be its bits. Whether they are
is tried for each kind of layer before the first step (`worker.model_check`); a layer in which they are not has its
backward whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class _Product:
    """A weight product.

    Args:
        parameters: the weight, and the bias or None: what W gives gradients of.
        operand: what W needs beside the gradient of the output: the operator's input.
        of_input: the gradient of the operator's output -> that of its input.
        of_weights: the same -> those of the parameters.
    """

    parameters: tuple[nn.Parameter, nn.Parameter | None]
    operand: Tensor
    of_input: Callable[[Tensor], Tensor]
    of_weights: Callable[[Tensor], tuple[Tensor, Tensor | None]]


class _PutOff(torch.autograd.Function):
    """An operator whose weight product is put off.

    It makes a tensor of its own, which the layer may change in place: a hook on the output of torch's operator would be
    lost then, and the product with it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[], Tensor], product: _Product, products: WeightProducts) -> Tensor:
        ctx.product, ctx.products = product, products
        y = run()
        # The output of torch's linear may be a view of another tensor's rows, which could not be changed in place here.
        return torch.ops.aten._unsafe_view.default(y, y.shape) if y._is_view() else y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (dy,) = grads
        ctx.products.brought.append((ctx.product, dy))
        return ctx.product.of_input(dy), None, None, None


@dataclass
class WeightProducts:
    """The weight products of one layer and micro-batch, put off until W.

    Args:
        brought: products with the gradient of their output, in the order in which B has brought them.
    """

    brought: list[tuple[_Product, Tensor]] = field(default_factory=list)

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """All tensors that are kept until W."""
        return tuple(tensor for product, dy in self.brought for tensor in (product.operand, dy))

    def gradients(self, parameters: Sequence[nn.Parameter], others: Sequence[Tensor | None]) -> list[Tensor | None]:
        """W: the gradients of a layer's parameters.

        Args:
            others: those that B has made, by parameter; None where it has made none.
        """
        found: dict[int, Tensor] = {}
        for product, dy in self.brought:
            for parameter, gradient in zip(product.parameters, product.of_weights(dy), strict=True):
                if parameter is not None and gradient is not None:
                    before = found.get(id(parameter))
                    found[id(parameter)] = gradient if before is None else before + gradient
        self.brought.clear()
        together = []
        for parameter, other in zip(parameters, others, strict=True):
            own = found.get(id(parameter))
            together.append(other if own is None else own if other is None else other + own)
        return together


class SplitLayer:
    """A layer whose forwards put off the weight products of their backward, while `products` is set.

    Args:
        parameters: of the layer, those that are trained. Those that can be a weight of a product, having two dims or
            more, are `SplitParameter`s until `unbind`. One of a class of its own, a tensor that wraps another one, has
            its own way with operators, and keeps it.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.products: WeightProducts | None = None
        self._weights = [one for one in parameters if one.dim() >= 2 and type(one) is nn.Parameter]
        for parameter in self._weights:
            parameter.__class__ = SplitParameter
            assert isinstance(parameter, SplitParameter)
            parameter.layer = self

    def unbind(self) -> None:
        """Make the parameters plain ones again: their operators cost nothing more."""
        for parameter in self._weights:
            parameter.__class__ = nn.Parameter
            del vars(parameter)["layer"]


class SplitParameter(nn.Parameter):
    """A parameter that tells operators with a weight product from others. Only operators that it is given to pay."""

    layer: SplitLayer

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        put_off = _OPERATORS.get(func)
        if put_off is not None and torch.is_grad_enabled():
            with torch._C.DisableTorchFunctionSubclass():
                output = put_off(*args, **(kwargs or {}))
            if output is not None:
                return output
        return super().__torch_function__(func, types, args, kwargs or {})


def _products_of(weight: object) -> WeightProducts | None:
    """Where the products of this weight are put off; None: they are not."""
    if isinstance(weight, SplitParameter) and weight.requires_grad:
        return weight.layer.products
    return None


def _detached(bias: Tensor | None) -> tuple[Tensor | None, nn.Parameter | None]:
    """A bias as the operator gets it, and as W has to make a gradient of it: that of a sum over rows."""
    if isinstance(bias, nn.Parameter) and bias.requires_grad:
        return bias.detach(), bias
    return bias, None


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    products = _products_of(weight)
    if products is None or not input.requires_grad or input.dim() < 2:
        return None
    assert isinstance(weight, nn.Parameter)
    x, w, (given, graded) = input.detach(), weight.detach(), _detached(bias)

    def of_input(dy: Tensor) -> Tensor:
        return _rows(dy).mm(w).view(x.shape)

    def of_weights(dy: Tensor) -> tuple[Tensor, Tensor | None]:
        rows = _rows(dy)
        return rows.t().mm(_rows(x)), None if graded is None else rows.sum(0)

    product = _Product((weight, graded), x, of_input, of_weights)
    return _PutOff.apply(input, lambda: torch.nn.functional.linear(x, w, given), product, products)


def _matmul(input: Tensor, other: Tensor) -> Tensor | None:
    products = _products_of(other)
    if products is None or not input.requires_grad or input.dim() < 2 or other.dim() != 2:
        return None
    assert isinstance(other, nn.Parameter)
    x, w = input.detach(), other.detach()

    def of_input(dy: Tensor) -> Tensor:
        return _rows(dy).mm(w.t()).view(x.shape)

    def of_weights(dy: Tensor) -> tuple[Tensor, None]:
        return _rows(x).t().mm(_rows(dy)), None

    product = _Product((other, None), x, of_input, of_weights)
    return _PutOff.apply(input, lambda: torch.matmul(x, w), product, products)


def _rows(tensor: Tensor) -> Tensor:
    """All dims but the last as one."""
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
    products = _products_of(weight)
    if products is None or not input.requires_grad or isinstance(padding, str) or input.dim() != dims + 2:
        return None
    assert isinstance(weight, nn.Parameter)
    x, w, (given, graded) = input.detach(), weight.detach(), _detached(bias)
    each = lambda value: [value] * dims if isinstance(value, int) else list(value)  # noqa: E731
    forms = (each(stride), each(padding), each(dilation), False, [0] * dims, groups)

    def of_input(dy: Tensor) -> Tensor:
        return torch.ops.aten.convolution_backward(dy, x, w, None, *forms, [True, False, False])[0]

    def of_weights(dy: Tensor) -> tuple[Tensor, Tensor | None]:
        sizes = None if graded is None else [w.shape[0]]
        wanted = [False, True, graded is not None]
        # No more than the form of the weight counts. Its values may be gone by now (ZeRO-3).
        form = torch.empty_strided(w.shape, w.stride(), dtype=w.dtype, device=w.device)
        _, of_weight, of_bias = torch.ops.aten.convolution_backward(dy, x, form, sizes, *forms, wanted)
        return of_weight, None if graded is None else of_bias

    product = _Product((weight, graded), x, of_input, of_weights)
    run = lambda: operator(x, w, given, stride, padding, dilation, groups)  # noqa: E731
    return _PutOff.apply(input, run, product, products)


def _conv1d(*args: Any, **kwargs: Any) -> Tensor | None:
    return _convolution(torch.conv1d, 1, *args, **kwargs)


def _conv2d(*args: Any, **kwargs: Any) -> Tensor | None:
    return _convolution(torch.conv2d, 2, *args, **kwargs)


def _conv3d(*args: Any, **kwargs: Any) -> Tensor | None:
    return _convolution(torch.conv3d, 3, *args, **kwargs)


_OPERATORS: dict[Callable[..., Any], Callable[..., Tensor | None]] = {
    torch.nn.functional.linear: _linear,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    torch.conv1d: _conv1d,
    torch.conv2d: _conv2d,
    torch.conv3d: _conv3d,
}
"""Operators with a weight product -> those that put it off; these return None where they do not."""
