"""Class activation maps of each member by Grad-CAM, and their similarity.

    w_k = (1/hw) Σ_uv ∂y_c/∂A_kuv,    m = relu(Σ_k w_k A_k)                           Selvaraju et al. (2017)
    s_ij = (1/B) Σ_b ⟨m_ib, m_jb⟩ / (‖m_ib‖ ‖m_jb‖),    similarity: the mean of s_ij over pairs i < j

y_c is a member's logit of class c. A is the activation (k channels, h × w pixels) that the member pools or flattens at
the end: the last 4-dimensional tensor with more than one pixel that a convolution outputs or that is computed from one,
and that the logits depend on. It is traced during the forward pass, whether modules or functions compute it; in a wide
residual network it is the output of the last ReLU, which is not a module there. With pooling and a linear head, w_k is
the head's weight over hw, and the mean of Σ_k w_k A_k over the pixels is (y_c − bias)/hw.

The paper does not state for which class. The default is the ensemble's prediction, because with each member's own
prediction, members that disagree get different maps for that reason alone.

Shapes: n members, B images, C classes, k channels, h × w pixels of a map.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from featureflock.ensemble.ensemble import Ensemble
from featureflock.ensemble.execution import eval_mode
from featureflock.evaluation.checks import INTEGERS

Block = Callable[[nn.Module], nn.Module]


class Maps(NamedTuple):
    """Class activation maps, and their classes."""

    maps: Tensor
    """(n, B, h, w) float32, not negative. A map is zero everywhere if nothing supports the class."""
    classes: Tensor
    """(n, B), the class that each map is for."""


def class_activation_maps(
    ens: Ensemble, x: Any, classes: Tensor | Literal["ensemble", "member"] = "ensemble", *, block: Block | None = None
) -> Maps:
    """Grad-CAM of each member for each image of a batch, always in eval mode.

    Members are computed one after another, with the memory of one member. Weights and their gradients do not change.

    Args:
        ens: an ensemble of convolutional members.
        x: input of the extractors, such as normalised images (B, channels, H, W).
        classes: "ensemble" for the ensemble's prediction, "member" for each member's own one, or class indices (B,).
        block: maps an extractor to the submodule whose output is A, such as `lambda e: e.blocks`; by default traced.
    """
    given = isinstance(classes, Tensor) and classes.dtype in INTEGERS and classes.ndim == 1
    if not given and not (isinstance(classes, str) and classes in ("ensemble", "member")):
        got = f"{classes.dtype} {tuple(classes.shape)}" if isinstance(classes, Tensor) else repr(classes)
        raise ValueError(f'classes must be "ensemble", "member" or a tensor of integers (B,); got {got}.')
    # Compiled operations cannot be traced. Unless torch._dynamo is imported, there are none.
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    with eval_mode(ens), eager, torch.inference_mode(False), torch.enable_grad():
        members = map(ens.member, range(len(ens)))  # one at a time: rank-one and LoRA members are made as copies
        x = x.clone() if isinstance(x, Tensor) and x.is_inference() else x
        if isinstance(classes, str) and classes == "ensemble":
            with torch.no_grad():
                logits_nbc = ens(x)
            classes = logits_nbc.float().softmax(-1).mean(0).argmax(-1)
        pairs = [_grad_cam(i, member, x, classes, block) for i, member in enumerate(members)]
    sizes = [f"{m_bhw.shape[-2]} × {m_bhw.shape[-1]}" for m_bhw, _ in pairs]
    if len(set(sizes)) > 1:
        raise ValueError(f"The members' maps must have one size; got {', '.join(sizes)}.")
    return Maps(*(torch.stack(parts) for parts in zip(*pairs, strict=True)))


def cam_similarity(maps: Tensor) -> float:
    """Mean of s_ij over pairs of members, from maps (n, B, h, w): 0 for disjoint maps, 1 for equal ones.

    A map of zeros has similarity 0 to all others, so check `empty_fraction` as well.
    """
    n = len(s_nn := cam_similarity_matrix(maps))
    if n < 2:
        raise ValueError("Similarity needs at least two members; there is only one.")
    return (s_nn.sum() - s_nn.trace()).item() / (n * (n - 1))


def cam_similarity_matrix(maps: Tensor) -> Tensor:
    """s_ij of maps (n, B, h, w), as (n, n) float64. The diagonal is the fraction of maps that are not empty."""
    m_nbp = checked_maps(maps).flatten(2)
    m_nbp = m_nbp / m_nbp.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    s_nn: Tensor = torch.einsum("ibp,jbp->ij", m_nbp, m_nbp) / m_nbp.shape[1]
    return s_nn


def empty_fraction(maps: Tensor) -> float:
    """Fraction of maps (n, B, h, w) that are zero everywhere."""
    return (checked_maps(maps) == 0).all(-1).all(-1).double().mean().item()


def _grad_cam(i: int, member: nn.Module, x: Any, classes: Tensor | str, block: Block | None) -> tuple[Tensor, Tensor]:
    """Maps (B, h, w) and classes (B,) of member i."""
    # Aliases of the weights that require gradients, so that the member's own parameters stay untouched.
    weights = {name: p.detach().requires_grad_() for name, p in member.named_parameters()}
    activations: list[Tensor] = []
    with _Tracer(activations) if block is None else _record(block, member, i, activations):
        logits_bc = functional_call(member, weights, (x,))
    if logits_bc.ndim != 2:
        raise ValueError(f"Grad-CAM needs logits (examples, classes) of each member; got {tuple(logits_bc.shape)}.")
    b, c = logits_bc.shape
    c_b = logits_bc.argmax(-1) if isinstance(classes, str) else classes.to(logits_bc.device, torch.int64)
    wrong = c_b[(c_b < 0) | (c_b >= c)]
    if c_b.shape != (b,) or len(wrong):
        got = wrong[0].item() if len(wrong) else f"{len(c_b)} of them"
        raise ValueError(f"classes must be {b} numbers from 0 to {c - 1}, one for each image; got {got}.")
    y = logits_bc.gather(-1, c_b[:, None]).sum()  # one backward pass: no logit depends on another image
    for a_bkhw in reversed([a for a in activations if len(a) == b and y.requires_grad]):
        (grad_bkhw,) = torch.autograd.grad(y, a_bkhw, retain_graph=True, allow_unused=True)
        if grad_bkhw is not None:
            w_bk = grad_bkhw.float().mean((-2, -1))
            return torch.einsum("bk,bkhw->bhw", w_bk, a_bkhw.detach().float()).relu(), c_b
    what = "convolutional map of more than one pixel" if block is None else "output of the block"
    raise ValueError(f"Grad-CAM needs convolutional members; the logits of member {i} do not depend on any {what}.")


def checked_maps(maps: Tensor) -> Tensor:
    """Maps (n, B, h, w) in float64; invalid ones raise ValueError."""
    if not isinstance(maps, Tensor) or maps.ndim != 4 or maps.numel() == 0 or not maps.is_floating_point():
        got = tuple(maps.shape) if isinstance(maps, Tensor) else type(maps).__name__
        raise ValueError(f"maps must be floating-point numbers (members, images, height, width); got {got}.")
    if not maps.isfinite().all():
        member, image = (~maps.isfinite()).nonzero()[0, :2].tolist()
        raise ValueError(f"maps must be finite; the map of member {member} for image {image} holds NaN or infinity.")
    return maps.detach().double()


def _record(block: Block, member: nn.Module, i: int, activations: list[Tensor]) -> AbstractContextManager[Any]:
    """Append the outputs of a module to `activations`, call by call."""
    module = block(member.extractor)  # type: ignore[arg-type]
    if not isinstance(module, nn.Module):
        raise ValueError(f"block must return a submodule of the extractor; for member {i} it returned {module!r}.")

    def store(_: nn.Module, args: Any, out: Any) -> Tensor:
        if not isinstance(out, Tensor) or out.ndim != 4:
            got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(f"The block must output (B, channels, height, width); that of member {i} outputs {got}.")
        activations.append(out)
        return out.clone()  # later operations may be in place

    return module.register_forward_hook(store)


class _Tracer(TorchFunctionMode):
    """Records outputs of convolutions and the 4-dimensional tensors computed from them, in order."""

    convolutions = frozenset({F.conv2d, F.conv_transpose2d, torch.convolution})

    def __init__(self, activations: list[Tensor]) -> None:
        super().__init__()
        self.activations, self._ids = activations, set[int]()  # the list keeps tensors alive, so ids stay unique

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in self.convolutions or any(id(t) in self._ids for t in _leaves((args, kwargs))):
            for t in _leaves(out):
                if isinstance(t, Tensor) and t.ndim == 4 and t.shape[-2:].numel() > 1 and t.requires_grad:
                    self.activations.append(t)
                    self._ids.add(id(t))
        return out


def _leaves(tree: Any) -> list[Any]:
    if not isinstance(tree, tuple | list | dict):
        return [tree]
    return [leaf for part in (tree.values() if isinstance(tree, dict) else tree) for leaf in _leaves(part)]
