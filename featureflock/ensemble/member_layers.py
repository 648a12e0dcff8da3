"""Layers of n members that share their matrices. Rows of member i follow those of member i − 1: inputs are (n·B, …).

    rank one   W_i = W ∘ (r_i s_iᵀ):    y_i = r_i ∘ (W (s_i ∘ x_i)) + b_i          Wen et al. (2020), BatchEnsemble
    LoRA       W_i = W + (α/ρ) B_i A_i:  y_i = W x_i + b + (α/ρ) B_i A_i x_i         Hu et al. (2022), W and b frozen

Member i has its own r_i, s_i and bias, or A_i and B_i, and its own normalisation layers. One matrix product or
convolution with W serves all members. Where the matrices W_i of one layer are smaller than its input, as in
convolutions of images, it is cheaper to scale W than the activations, and the products with W_i are computed
instead. A convolution has one r for each output channel and one s for each input channel.
An embedding has one r for each feature and one s for each entry.

The shared matrix gets the mean over members of what n separate copies would get (`scale_gradient`):

    ∂L/∂W = (1/n) Σ_i (∂L/∂W_i) ∘ (r_i s_iᵀ)

Shapes: n members, k of them computed, B examples, V entries of an embedding, ρ the rank.
"""

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class MemberLayer(nn.Module):
    """Base class of layers with parameters (n, …), one row per member. `SharedMembers` sets which are computed.

    The layer that it replaces becomes its submodule `base`, with the weights that the members share.
    """

    part: tuple[int, int] | None = None
    """First and last + 1 of the members that are computed; None for all."""
    gradient_factor: float | None = None
    """Factor of the gradient of shared weights; None for 1/n."""

    rows: int | None = None
    """k·B, the number of rows of the current call; None outside of one."""

    def __init__(self, members: int) -> None:
        super().__init__()
        self.members = members

    def own(self, tensor: Tensor) -> Tensor:
        """Rows of the members that are computed."""
        return tensor if self.part is None else tensor[slice(*self.part)]

    def materialise(self, i: int) -> nn.Module:
        """The ordinary layer of member i."""
        raise NotImplementedError

    def _product(self, base: nn.Module, x: Tensor) -> Tensor:
        """The shared layer, without its bias, whose weight gets the mean of the members' gradients."""
        weight = base.weight
        assert isinstance(weight, Tensor)
        out: Tensor
        if not (torch.is_grad_enabled() and weight.requires_grad):
            out = base(x)
            return out
        weight = self._shared_weight(base)
        if isinstance(base, nn.Linear):
            out = F.linear(x, weight, base.bias)
        elif isinstance(base, CONVOLUTIONS):
            out = base._conv_forward(x, weight, base.bias)  # as the layer itself calls it, with its padding mode
        else:
            out = functional_call(base, {"weight": weight}, (x,))
        return out

    def _batched(self, x: Tensor) -> Tensor:
        """x with the rows of all members: an input without a batch, such as positions (1, T), is repeated."""
        if self.rows is None or x.shape[0] % self.rows == 0:
            return x
        if x.shape[0] == 1:
            return x.expand(self.rows, *x.shape[1:])
        name = type(getattr(self, "base", self)).__name__
        raise ValueError(
            f"A {name} got {len(x)} rows instead of {self.rows}; members in one network need a network that treats the "
            "first dimension as the batch."
        )

    def _shared_weight(self, base: nn.Module) -> Tensor:
        assert isinstance(base.weight, Tensor)
        return scale_gradient(base.weight, 1 / self.members if self.gradient_factor is None else self.gradient_factor)

    def _split(self, x: Tensor) -> Tensor:
        """(k·B, …) -> (k, B, …)."""
        first, last = self.part or (0, self.members)
        parts: Tensor = x.unflatten(0, (last - first, -1))
        return parts

    def _scaled(self, x: Tensor, factor: Tensor, shift: Tensor | None = None) -> Tensor:
        """factor ∘ x + shift for rows x (k·B, …), with factor and shift (k, 1, …) of each member."""
        if torch.compiler.is_exporting():  # the strides of products of split rows would fix the batch size
            x = x * self._repeated_rows(factor, x)
            return x if shift is None else x + self._repeated_rows(shift, x)
        parts = self._split(x)
        return (parts * factor if shift is None else torch.addcmul(shift, parts, factor)).flatten(0, 1)

    def _repeated_rows(self, vectors: Tensor, x: Tensor) -> Tensor:
        """Vectors (k, 1, …) of each member, repeated for its rows in x: (k·B, …)."""
        return vectors.expand(-1, x.shape[0] // len(vectors), *vectors.shape[2:]).flatten(0, 1)


class RankOne(MemberLayer):
    """Linear layer, convolution or embedding with W_i = W ∘ (r_i s_iᵀ)."""

    bias: nn.Parameter | None

    def __init__(self, base: nn.Module, r: Tensor, s: Tensor) -> None:
        super().__init__(len(r))
        self.base = base
        self.r, self.s = nn.Parameter(r), nn.Parameter(s)
        bias = getattr(base, "bias", None)
        if bias is not None:
            self.bias = _repeated(bias, len(r))
            self.base.register_parameter("bias", None)
        else:
            self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        x = self._batched(x)
        if isinstance(self.base, nn.Embedding):
            s = self.own(self.s)  # (k, V)
            offset = torch.arange(len(s), device=x.device).mul(s.shape[1]).view(-1, *[1] * x.ndim)
            scale = F.embedding(x + self._repeated_rows(offset, x), s.reshape(-1, 1))
            return self._scaled(self._product(self.base, x) * scale, self._aligned(self.r, x.ndim + 2, -1))
        if not torch.compiler.is_exporting() and self._scales_weights(x):  # an exported graph is for any batch size
            return self._products(x)
        channel = -1 if isinstance(self.base, nn.Linear) else 2
        y = self._product(self.base, self._scaled(x, self._aligned(self.s, x.ndim + 1, channel)))
        bias = None if self.bias is None else self._aligned(self.bias, y.ndim + 1, channel)
        return self._scaled(y, self._aligned(self.r, y.ndim + 1, channel), bias)

    def _scales_weights(self, x: Tensor) -> bool:
        """Whether W is scaled instead of inputs and outputs: where the matrices of k members are smaller than x."""
        first, last = self.part or (0, self.members)
        weight = self.base.weight
        assert isinstance(weight, Tensor)
        return not isinstance(self.base, TRANSPOSED) and (last - first) * weight.numel() <= x.numel()

    def _products(self, x: Tensor) -> Tensor:
        """W_i x_i + b_i with the matrices of the members."""
        base, weight = self.base, self._shared_weight(self.base)
        factors = self._factors(self.own(self.r), self.own(self.s))
        factors = factors.reshape(*factors.shape, *[1] * (weight.ndim - 2))
        bias = None if self.bias is None else self.own(self.bias)
        if isinstance(base, nn.Linear):
            rows, weights = self._split(x).flatten(1, -2), weight * factors  # (k, rows, inputs)
            y = rows @ weights.mT if bias is None else torch.baddbmm(bias[:, None], rows, weights.mT)
            return y.reshape(*x.shape[:-1], -1)
        assert isinstance(base, CONVOLUTIONS)
        biases = [None] * len(factors) if bias is None else bias
        parts = zip(x.chunk(len(factors)), factors, biases, strict=True)
        return torch.cat([base._conv_forward(x_i, weight * f_i, b_i) for x_i, f_i, b_i in parts])

    def _factors(self, r: Tensor, s: Tensor) -> Tensor:
        """r_i s_iᵀ of k members, from r (k, outputs) and s (k, inputs), as the first two dimensions of W have them."""
        if isinstance(self.base, nn.Embedding):  # weight (entries, features)
            return s[:, :, None] * r[:, None]
        groups = 1 if isinstance(self.base, nn.Linear) else self.base.groups
        assert isinstance(groups, int)
        r, s = r.unflatten(1, (groups, -1)), s.unflatten(1, (groups, -1))
        if isinstance(self.base, TRANSPOSED):  # weight (inputs, outputs / groups, …)
            r, s = s, r
        return (r[..., None] * s[:, :, None]).flatten(1, 2)  # weight (outputs, inputs / groups, …)

    def _aligned(self, vectors: Tensor, ndim: int, channel: int) -> Tensor:
        """Vectors (n, C) of the computed members, with C at dimension `channel` of `ndim`."""
        shape = [1] * ndim
        shape[0], shape[channel] = -1, vectors.shape[1]
        return self.own(vectors).reshape(shape)

    def materialise(self, i: int) -> nn.Module:
        layer = copy.deepcopy(self.base)
        weight = layer.weight
        assert isinstance(weight, nn.Parameter)
        with torch.no_grad():
            (factor,) = self._factors(self.r[i : i + 1], self.s[i : i + 1])
            weight.mul_(factor.reshape(*factor.shape, *[1] * (weight.ndim - 2)))
        if self.bias is not None:
            layer.bias = nn.Parameter(self.bias[i].detach().clone(), self.bias.requires_grad)
        return layer


class LoRA(MemberLayer):
    """Linear layer, convolution or embedding with W_i = W + (α/ρ) B_i A_i, on a frozen W."""

    def __init__(self, base: nn.Module, members: int, rank: int, alpha: float) -> None:
        super().__init__(members)
        self.base, self.scale = base.requires_grad_(False), alpha / rank
        weight = self.base.weight
        assert isinstance(weight, Tensor)
        if isinstance(base, nn.Embedding):  # W is (V, features), so it is W + (α/ρ) (B A)ᵀ with A (ρ, V)
            a, b = (members, weight.shape[0], rank), (members, weight.shape[1], rank)
        else:
            a, b = (members, rank, weight[0].numel()), (members, weight.shape[0], rank)
        std = 1 / math.sqrt(weight[0].numel())
        self.a = nn.Parameter(torch.randn(a).mul(std).to(weight))
        self.b = nn.Parameter(torch.zeros(b).to(weight))
        if isinstance(base, nn.Embedding) and base.padding_idx is not None:
            self.a.data[:, base.padding_idx] = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self._batched(x)
        y, a, b = self._product(self.base, x), self.own(self.a), self.own(self.b)
        parts = self._split(x)
        if isinstance(self.base, nn.Linear):
            delta = torch.bmm(torch.bmm(parts.reshape(len(a), -1, parts.shape[-1]), a.mT), b.mT)
        elif isinstance(self.base, nn.Embedding):
            rows = zip(parts, a, strict=True)
            delta = torch.stack([F.embedding(each, a_i, self.base.padding_idx) for each, a_i in rows])
            delta = torch.bmm(delta.flatten(1, -2), b.mT)
        else:
            delta = torch.cat([self._convolve(*each) for each in zip(parts, a, b, strict=True)])
        return torch.add(y, delta.view_as(y), alpha=self.scale)

    def _convolve(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """B A x of one member. Each group of channels uses the same A."""
        base = self.base
        assert isinstance(base, CONVOLUTIONS)
        filters = a.repeat(base.groups, 1).unflatten(1, base.weight.shape[1:])
        u = base._conv_forward(x, filters, None).unflatten(1, (base.groups, -1))  # (B, groups, ρ, …)
        y = torch.einsum("bgr...,gor->bgo...", u, b.unflatten(0, (base.groups, -1)))
        return y.flatten(1, 2)

    def materialise(self, i: int) -> nn.Module:
        layer = copy.deepcopy(self.base)
        weight = layer.weight
        assert isinstance(weight, nn.Parameter)
        delta = self.a[i] @ self.b[i].T if isinstance(layer, nn.Embedding) else self.b[i] @ self.a[i]
        with torch.no_grad():
            weight.add_(delta.view_as(weight), alpha=self.scale)
        return layer


class MemberNorm(MemberLayer):
    """LayerNorm, GroupNorm or RMSNorm with weights of each member."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, base: nn.Module, members: int) -> None:
        super().__init__(members)
        self.base = base
        self.weight = _repeated(base.weight, members)
        bias = getattr(base, "bias", None)
        self.bias = None if bias is None else _repeated(bias, members)
        self.base.register_parameter("weight", None)
        if bias is not None:
            self.base.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        x = self._batched(x)
        y = self.base(x)
        bias = None if self.bias is None else self._aligned(self.bias, y.ndim + 1)
        return self._scaled(y, self._aligned(self.weight, y.ndim + 1), bias)

    def _aligned(self, vectors: Tensor, ndim: int) -> Tensor:
        own, shape = self.own(vectors), vectors.shape[1:]
        if isinstance(self.base, nn.GroupNorm):  # the channels are dimension 1 of x
            return own.reshape(-1, 1, *shape, *[1] * (ndim - 3))
        return own.reshape(-1, *[1] * (ndim - 1 - len(shape)), *shape)

    def materialise(self, i: int) -> nn.Module:
        layer = copy.deepcopy(self.base)
        layer.weight = nn.Parameter(self.weight[i].detach().clone(), self.weight.requires_grad)
        if self.bias is not None:
            layer.bias = nn.Parameter(self.bias[i].detach().clone(), self.bias.requires_grad)
        return layer


class MemberBatchNorm(MemberLayer):
    """BatchNorm with statistics and weights of each member."""

    def __init__(self, base: nn.Module, members: int) -> None:
        super().__init__(members)
        self.base = base
        for name, tensor in list(base.named_parameters(recurse=False)):
            self.register_parameter(name, _repeated(tensor, members))
            setattr(self.base, name, None)
        for name, buffer in list(base.named_buffers(recurse=False)):
            self.register_buffer(name, buffer.detach().expand(members, *buffer.shape).clone())
            setattr(self.base, name, None)
        vars(base)["track_running_stats"] = False  # otherwise load_state_dict expects statistics

    def forward(self, x: Tensor) -> Tensor:
        x = self._batched(x)
        first, last = self.part or (0, self.members)
        rows = zip(range(first, last), self._split(x), strict=True)
        return torch.cat([self._normalise(i, part) for i, part in rows])

    def _normalise(self, i: int, x: Tensor) -> Tensor:
        base = self.base
        assert isinstance(base, BATCH_NORMS)
        base._check_input_dim(x)
        mean, var, count, weight, bias = (
            None if (t := getattr(self, name, None)) is None else t[i]
            for name in ("running_mean", "running_var", "num_batches_tracked", "weight", "bias")
        )
        momentum = 0.0 if base.momentum is None else base.momentum
        if self.training and count is not None:
            count.add_(1)
            if base.momentum is None:
                momentum = 1.0 / float(count)
        batch_statistics = self.training or mean is None
        return F.batch_norm(x, mean, var, weight, bias, batch_statistics, momentum, base.eps)

    def materialise(self, i: int) -> nn.Module:
        layer = copy.deepcopy(self.base)
        for name, tensor in self.named_parameters(recurse=False):
            setattr(layer, name, nn.Parameter(tensor[i].detach().clone(), tensor.requires_grad))
        for name, buffer in self.named_buffers(recurse=False):
            setattr(layer, name, buffer[i].clone())
            vars(layer)["track_running_stats"] = True
        return layer


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Return x; in the backward pass, multiply its gradient by a factor."""
    if factor == 1 or not (torch.is_grad_enabled() and x.requires_grad):
        return x
    out: Tensor = _ScaleGradient.apply(x, factor)  # type: ignore[no-untyped-call]
    return out


class _ScaleGradient(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, factor: float) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def _repeated(tensor: Any, members: int) -> nn.Parameter:
    """A copy of a parameter for each member."""
    return nn.Parameter(tensor.detach().expand(members, *tensor.shape).clone(), tensor.requires_grad)
