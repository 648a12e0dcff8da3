"""Which of two views of an input drives each member's prediction, and whether members use different views.

With ŷ_ib the class that member i predicts on the full input b,

    Δ_ibv    = max(ε, log p_i(ŷ_ib | x_b) − log p_i(ŷ_ib | x_b with view v blank)),    ε = 1e-6
    f_ib     = Δ_ib1 / (Δ_ib1 + Δ_ib2)              fraction driven by the first view: 1 all of it, 0 all by the second

ε makes the fraction ½ where a prediction survives the loss of either view. Members can differ in two ways:

    by input      mean over pairs i < j and inputs b of |f_ib − f_jb|
    on average    mean over pairs i < j of |f_i − f_j|,    f_i = mean over b of f_ib

The first measures whether two members use different views of the same input; the second, which is at most the first,
whether members specialise in views. With a_i the accuracy of a member on full inputs, a_iv with view v alone, and C
classes,

    r_iv = (a_iv − 1/C) / (a_i − 1/C),        view v is covered if max_i r_iv ≥ ½

so a covered view has a member that retains half of its accuracy above chance without the other view.

Shapes: n members, B inputs, C classes, V views.
"""

from collections.abc import Sequence

from torch import Tensor

from featureflock.evaluation.checks import checked_log_probs

_EPSILON = 1e-6


def first_view_fraction(full: Tensor, only_first: Tensor, only_second: Tensor) -> Tensor:
    """f_ib (n, B), from members' log-probabilities (n, B, C) on full inputs and on inputs with one view left."""
    shapes = [tuple(part.shape) for part in (full, only_first, only_second)]
    if len(set(shapes)) > 1:
        raise ValueError(f"All three must be predictions on the same inputs; got shapes {shapes}.")
    log_p, *blanks = (checked_log_probs(part, members=True) for part in (full, only_second, only_first))
    predicted = log_p.argmax(-1, keepdim=True)
    first, second = ((log_p - blank).gather(-1, predicted)[..., 0].clamp_min(_EPSILON) for blank in blanks)
    return first / (first + second)


def view_difference_by_input(fraction_nb: Tensor) -> float:
    """Mean over pairs of members and inputs of |f_ib − f_jb|; 0 for one member."""
    n, total = len(fraction_nb), (fraction_nb[:, None] - fraction_nb).abs().mean(-1).sum().item()  # counts pairs twice
    return float(total / max(1, n * (n - 1)))


def view_difference_on_average(fraction_nb: Tensor) -> float:
    """Mean over pairs of members of |f_i − f_j|; 0 for one member."""
    return view_difference_by_input(fraction_nb.mean(1, keepdim=True))


def covered_views(
    member_accuracy: Sequence[float], member_accuracy_by_view: Sequence[Sequence[float]], classes: int
) -> list[bool]:
    """For each view, whether some member retains half of its accuracy above chance with that view alone.

    Args:
        member_accuracy: (n,) on full inputs.
        member_accuracy_by_view: (V, n) with only that view left.
        classes: C, assumed to be equally frequent.
    """
    chance = 1 / classes
    pairs_by_view = [zip(member_accuracy, view, strict=True) for view in member_accuracy_by_view]
    return [any(a > chance and a_v - chance >= (a - chance) / 2 for a, a_v in pairs) for pairs in pairs_by_view]
