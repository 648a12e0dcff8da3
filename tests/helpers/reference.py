"""A naive float64 implementation of the paper: SVD, loops over particles, gradients by autograd.

It shares no code with the library, so the two cannot have the same error.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

LogDensity = Callable[[Tensor], Tensor]


def cauchy(precision: float) -> LogDensity:
    return lambda x: -torch.log1p(precision * x**2).sum()


def normal(precision: float) -> LogDensity:
    return lambda x: -precision * (x**2).sum() / 2


def uniform() -> LogDensity:
    return lambda x: (0 * x).sum()


def transport(
    h: Tensor,
    g: Tensor,
    log_prior: LogDensity,
    *,
    bandwidth: str | float = "median",
    rank: int | None = None,
    subspace: str = "dominant",
    rule: str = "WGD",
    repulsion: float = 1.0,
) -> Tensor:
    n, d = h.shape
    psi = torch.eye(d, dtype=h.dtype)
    if rank is not None:
        left, sigma, _ = torch.linalg.svd(g.T, full_matrices=False)  # descending
        left = left[:, sigma > 1e-6 * sigma[0]] if sigma[0] > 0 else left[:, :0]
        psi = left[:, :rank] if subspace == "dominant" else left[:, -rank:]
    z = h @ psi
    widths = _widths(z, bandwidth)

    def kernel(a: Tensor, b: Tensor, width: float) -> Tensor:
        return torch.exp(-((a - b) ** 2).sum() / width)

    def kernel_grad(i: int, j: int) -> Tensor:
        """∇_{z_i} k(z_i, z_j)."""
        a = z[i].clone().requires_grad_()
        return torch.autograd.grad(kernel(a, z[j], widths[i]), a)[0]

    k = torch.stack([torch.stack([kernel(z[i], z[j], widths[i]) for j in range(n)]) for i in range(n)])
    k_grad = torch.stack([sum(kernel_grad(i, j) for j in range(n)) for i in range(n)])
    x = h.clone().requires_grad_()
    score = torch.autograd.grad(log_prior(x), x)[0]
    drive = g + score
    if rule == "WGD":
        return torch.stack([drive[i] - repulsion * psi @ (k_grad[i] / sum(k[i])) for i in range(n)])
    if rule == "SteinWGD":
        return drive - repulsion * torch.linalg.solve(k + 0.01 * torch.eye(n, dtype=h.dtype), k_grad) @ psi.T
    assert rule == "SVGD"
    # With one bandwidth per row, ∇_{z_j} k(z_i, z_j) = −∇_{z_i} k(z_i, z_j).
    rows = [sum(k[i, j] * drive[j] - repulsion * psi @ kernel_grad(i, j) for j in range(n)) / n for i in range(n)]
    return torch.stack(rows)


def _widths(z: Tensor, bandwidth: str | float) -> list[float]:
    n = len(z)
    sq = [[float(((z[i] - z[j]) ** 2).sum()) for j in range(n)] for i in range(n)]
    if bandwidth == "median":
        return [_median([sq[i][j] for i in range(n) for j in range(i + 1, n)]) / math.log(n)] * n
    if bandwidth == "official":
        return [_median(row) ** 2 / math.log(n) + 1e-12 for row in sq]
    return [float(bandwidth)] * n


def _median(values: list[float]) -> float:
    ordered, m = sorted(values), len(values)
    return ordered[m // 2] if m % 2 else (ordered[m // 2 - 1] + ordered[m // 2]) / 2
