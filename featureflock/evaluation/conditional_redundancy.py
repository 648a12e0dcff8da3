"""Conditional redundancy of members: the information that their features share beyond the class.

    I(Z_i; Z_j | Y)      in nats, for each pair of members; 0 for features that are independent within each class

Discriminators (methods/discriminators.py) are trained on 70 % of the examples. The weights that do best on another 10 %
are evaluated on the other 20 %. The estimate is a lower bound up to sampling noise: for 16,000 examples of 4 to 8
Gaussian features it is 5 to 10 % too low; more so for fewer examples, more features, or members that are redundant in
some classes only. Features are first standardised within each class, which does not change I.

Shapes: n members, p pairs of them, B examples, H features.
"""

import math

import torch
from torch import Tensor

from featureflock.data import Stream, permutation
from featureflock.evaluation.checks import INTEGERS, as_tensor
from featureflock.methods.discriminators import TAU, DiscriminatorOutput, Discriminators, discriminate

_CHECK, _ROUNDS = 50, 4
"""Steps between two evaluations on the validation part, and negatives for each example of an evaluation."""


@torch.inference_mode(False)
@torch.enable_grad()
def conditional_redundancy(
    features: Tensor, labels: Tensor, *, steps: int = 600, batch: int = 256, tau: float = TAU, seed: int = 0
) -> Tensor:
    """I(Z_i; Z_j | Y) in nats from members' features (n, B, H) and labels (B,), as (n, n) with a zero diagonal.

        conditional_redundancy(ens.eval().features(x), y)

    For DICE's Gaussian features, pass the means: the first half of the last dimension.

    Args:
        features: features of the same B examples for all members; several thousand, and several of each class.
        labels: class indices.
        steps, batch: training steps of the discriminators, and their batch size.
        tau: τ, the bound on the log-ratios of densities.
        seed: seed of the split, the initial weights and the batches.
    """
    if steps < 1 or batch < 2 or not 0 < tau < math.inf:
        raise ValueError(f"Use at least 1 step, batches of 2 and a tau above 0; got {steps}, {batch} and {tau}.")
    z_nbh, y_b = (x.clone() for x in _checked(features, labels))
    n, b, h = z_nbh.shape
    order = permutation(b, seed, Stream.REDUNDANCY_FIT).to(y_b.device)
    train, validation, test = order.tensor_split([7 * b // 10, 8 * b // 10])
    z_nbh = _standardised(z_nbh, y_b, train)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        discriminators = Discriminators(n, h, int(y_b.max()) + 1).to(z_nbh)
    optimiser = torch.optim.AdamW(discriminators.parameters(), lr=1e-3, weight_decay=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    best = math.inf, discriminators.state_dict()
    for step in range(steps):
        chosen = train[permutation(len(train), seed, Stream.REDUNDANCY_FIT, step)[:batch]]
        optimiser.zero_grad()
        discriminate(discriminators, z_nbh[:, chosen], y_b[chosen]).discrimination().sum().backward()
        optimiser.step()
        schedule.step()
        if step % _CHECK == _CHECK - 1:
            loss = _evaluate(discriminators, z_nbh, y_b, validation, seed).discrimination().sum().item()
            if loss < best[0]:
                best = loss, {name: t.clone() for name, t in discriminators.state_dict().items()}
    discriminators.load_state_dict(best[1])
    outputs = _evaluate(discriminators, z_nbh, y_b, test, seed)
    if not outputs.weight.any():
        raise ValueError("No two examples of the test part have the same class; give more examples of each class.")
    i_nn = z_nbh.new_zeros(n, n)
    i_nn[discriminators.first, discriminators.second] = outputs.information(tau)
    return i_nn + i_nn.T


@torch.no_grad()
def _evaluate(model: Discriminators, z_nbh: Tensor, y_b: Tensor, positions: Tensor, seed: int) -> DiscriminatorOutput:
    """Discriminator outputs on the examples at some positions, each with several negatives."""
    outputs = [
        discriminate(model, z_nbh[:, chosen], y_b[chosen])
        for round_ in range(_ROUNDS)
        for chosen in positions[permutation(len(positions), seed, Stream.REDUNDANCY_ESTIMATE, round_)].split(1000)
    ]
    positive, negative, weight = (torch.cat(parts, -1) for parts in zip(*outputs, strict=True))
    return DiscriminatorOutput(positive, negative, (weight > 0) / (weight > 0).sum().clamp_min(1))


def _checked(features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    features, labels = as_tensor(features), as_tensor(labels)
    if not isinstance(features, Tensor) or not features.is_floating_point() or features.ndim != 3:
        got = f"{features.dtype} {tuple(features.shape)}" if isinstance(features, Tensor) else type(features).__name__
        raise ValueError(f"features must be floating-point numbers (members, examples, features); got {got}.")
    if len(features) < 2:
        raise ValueError("Redundancy needs at least two members; there is only one.")
    if not features.isfinite().all():
        raise ValueError("features must be finite; some are NaN or infinite.")
    if not isinstance(labels, Tensor) or labels.dtype not in INTEGERS or labels.shape != features.shape[1:2]:
        raise ValueError(f"labels must be a tensor of integers ({features.shape[1]},), one for each example.")
    if labels.numel() < 4 or int(labels.min()) < 0 or int(labels.bincount().max()) < 4:
        raise ValueError("labels must be class indices from 0, with at least two examples of some class.")
    return features.detach().float(), labels.to(features.device, torch.int64)


def _standardised(z_nbh: Tensor, y_b: Tensor, train: Tensor) -> Tensor:
    """Features with mean 0 and standard deviation 1 in each class of the training part, clamped to ±10."""
    for label in y_b.unique():
        of_class, trained = y_b == label, train[y_b[train] == label]
        if len(trained) > 1:
            deviation, mean = torch.std_mean(z_nbh[:, trained], 1, keepdim=True)
            z_nbh[:, of_class] = (z_nbh[:, of_class] - mean) / deviation.clamp_min(1e-6 * (1 + mean.abs()))
    return z_nbh.clamp(-10, 10)  # a feature that rarely varies, as after a ReLU, must not dominate
