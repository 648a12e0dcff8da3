"""The conditional redundancy of trained members: how much their features tell of each other beyond the class.

    I(Z_i; Z_j | Y)      in nats, for each pair of members; 0 for features that are independent within each class

Discriminators (methods/redundancy.py) learn on seven tenths of the examples; of their weights on the way, those that
are best on another tenth are judged on the rest. What they have not learnt to tell is missing from the estimate: it is
a lower bound up to the noise of the sample. For 16,000 examples of 4 to 8 Gaussian features it is some 5 to 10 % low;
for fewer examples, more features or members that are redundant in some classes alone, more. Features are first brought
to mean 0 and deviation 1 in each class, which leaves I as it is.

Shapes: n members, p pairs of them, B examples, H features.
"""

import math

import torch
from torch import Tensor

from featureflock.data import permutation
from featureflock.evaluation.checks import INTEGERS
from featureflock.methods.discriminators import TAU, DiscriminatorOutput, Discriminators, discriminate

_LEARNING, _JUDGING = 1, 2
"""Which random orders are for what."""
_CHECK = 50
"""Steps between two looks at how well they do."""
_ROUNDS = 4
"""How many negatives each example that they are judged on gets."""


def conditional_redundancy(
    features: Tensor, labels: Tensor, *, steps: int = 600, batch: int = 256, tau: float = TAU, seed: int = 0
) -> Tensor:
    """I(Z_i; Z_j | Y) in nats of members' features (n, B, H) and labels (B,), as (n, n) with zeros on its diagonal.

    For an ensemble: `conditional_redundancy(ens.eval().features(x), y)`; of DICE's Gaussian features, take the means:
    the first half of the last dimension.

    Args:
        features: of the same B examples for all members; B of some thousands, and several of each class.
        labels: their classes, integers from 0.
        steps, batch: of the discriminators' training.
        tau: τ, which log-ratios of densities are kept below.
        seed: draws the halves, the initial weights and the batches.
    """
    if steps < 1 or batch < 2 or not 0 < tau < math.inf:
        raise ValueError(f"Use at least 1 step, batches of 2 and a tau above 0; got {steps}, {batch} and {tau}.")
    z_nbh, y_b = _checked(features, labels)
    with torch.inference_mode(False), torch.enable_grad():
        return _estimated(z_nbh.clone(), y_b.clone(), steps, batch, tau, seed)


def _estimated(z_nbh: Tensor, y_b: Tensor, steps: int, batch: int, tau: float, seed: int) -> Tensor:
    n, count, h = z_nbh.shape
    order = permutation(count, seed, _LEARNING).to(y_b.device)
    learn, check, held_out = order.tensor_split([7 * count // 10, 8 * count // 10])
    z_nbh = _standardised(z_nbh, y_b, learn)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        discriminators = Discriminators(n, h, int(y_b.max()) + 1).to(z_nbh)
    optimiser = torch.optim.AdamW(discriminators.parameters(), lr=1e-3, weight_decay=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    best = math.inf, discriminators.state_dict()
    for step in range(steps):
        chosen = learn[permutation(len(learn), seed, _LEARNING, step)[:batch]]
        optimiser.zero_grad()
        discriminate(discriminators, z_nbh[:, chosen], y_b[chosen]).discrimination().sum().backward()
        optimiser.step()
        schedule.step()
        if step % _CHECK == _CHECK - 1:
            confusion = _judged(discriminators, z_nbh, y_b, check, seed).discrimination().sum().item()
            if confusion < best[0]:
                best = confusion, {name: t.clone() for name, t in discriminators.state_dict().items()}
    discriminators.load_state_dict(best[1])
    verdicts = _judged(discriminators, z_nbh, y_b, held_out, seed)
    if not verdicts.weight.any():
        raise ValueError("No two examples to judge by are of one class; give more examples of each class.")
    information_p = verdicts.information(tau)
    i_nn = z_nbh.new_zeros(n, n)
    i_nn[discriminators.first, discriminators.second] = information_p
    return i_nn + i_nn.T


@torch.no_grad()
def _judged(
    discriminators: Discriminators, z_nbh: Tensor, y_b: Tensor, positions: Tensor, seed: int
) -> DiscriminatorOutput:
    """On the examples at these positions, each with several negatives."""
    found = [
        discriminate(discriminators, z_nbh[:, chosen], y_b[chosen])
        for turn in range(_ROUNDS)
        for chosen in positions[permutation(len(positions), seed, _JUDGING, turn)].split(1000)
    ]
    paired = torch.cat([verdicts.weight > 0 for verdicts in found])
    positive, negative = (torch.cat(parts, -1) for parts in ([v.positive for v in found], [v.negative for v in found]))
    return DiscriminatorOutput(positive, negative, paired / paired.sum().clamp_min(1))


def _checked(features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    if not isinstance(features, Tensor) or not features.is_floating_point() or features.ndim != 3:
        got = f"{features.dtype} {tuple(features.shape)}" if isinstance(features, Tensor) else type(features).__name__
        raise ValueError(f"features must be floating-point numbers (members, examples, features); got {got}.")
    if len(features) < 2:
        raise ValueError("Redundancy is between pairs of members; there is only one.")
    if not isinstance(labels, Tensor) or labels.dtype not in INTEGERS or labels.shape != features.shape[1:2]:
        got = f"{labels.dtype} {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
        raise ValueError(f"labels must be integers ({features.shape[1]},), one for each example; got {got}.")
    if not features.isfinite().all():
        raise ValueError("features must be finite; some are NaN or infinite.")
    if labels.numel() < 4 or int(labels.min()) < 0 or int(labels.bincount().max()) < 4:
        raise ValueError("labels must be from 0, and there must be several examples of a class to compare.")
    return features.detach().float(), labels.to(features.device, torch.int64)


def _standardised(z_nbh: Tensor, y_b: Tensor, learn: Tensor) -> Tensor:
    """With mean 0 and deviation 1 in each class, among the examples to learn from.

    Ten deviations are the most: what hardly ever varies, such as a feature behind a ReLU, must not outweigh all else.
    """
    for label in y_b.unique():
        of_class, learnt = y_b == label, learn[y_b[learn] == label]
        if len(learnt) > 1:
            deviation, mean = torch.std_mean(z_nbh[:, learnt], 1, keepdim=True)
            z_nbh[:, of_class] = (z_nbh[:, of_class] - mean) / deviation.clamp_min(1e-6 * (1 + mean.abs()))
    return z_nbh.clamp(-10, 10)
