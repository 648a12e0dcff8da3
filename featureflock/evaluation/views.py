"""Which of two views of an input drives each member's prediction, and whether members use different ones.

With ŷ_ib the class that member i predicts on the whole input b,

    Δ_ibv    = max(ε, log p_i(ŷ_ib | x_b) − log p_i(ŷ_ib | x_b with view v blank)),    ε = 1e-6
    share_ib = Δ_ib1 / (Δ_ib1 + Δ_ib2)                    of the first view: 1, all hangs on it; 0, all on the second

ε makes the share ½ where a prediction survives the loss of either view. Members can differ in two ways:

    by input      mean over pairs i < j and inputs b of |share_ib − share_jb|
    on average    mean over pairs i < j of |share_i − share_j|,    share_i = mean over b of share_ib

The first asks whether two members look at different views of one input, whichever it is. The second asks whether some
members specialise in one view and some in the other. It is at most the first, and 0 for members of which each relies on
the first view as much as the others do, on average over inputs. With a_i the accuracy of a member on whole inputs, a_iv
with view v alone, and C classes,

    kept_iv = (a_iv − 1/C) / (a_i − 1/C),        view v is covered if max_i kept_iv ≥ ½

so a covered view has a member that can do without the other one: it keeps half of what it knows beyond chance.

Shapes: n members, B inputs, C classes, V views.
"""

from collections.abc import Sequence

from torch import Tensor

from featureflock.evaluation.checks import checked_log_probs

_EPSILON = 1e-6
_HALF = 0.5


def first_view_share(whole: Tensor, only_first: Tensor, only_second: Tensor) -> Tensor:
    """share_ib (n, B), from members' log-probabilities (n, B, C) on inputs that are whole or have one view left."""
    for part in (only_first, only_second):
        if part.shape != whole.shape:
            raise ValueError(
                f"All three must be predictions on the same inputs; got shapes {tuple(whole.shape)} and "
                f"{tuple(part.shape)}."
            )
    log_p, without_second, without_first = (
        checked_log_probs(part, members=True) for part in (whole, only_first, only_second)
    )
    predicted = log_p.argmax(-1, keepdim=True)
    first, second = (
        (log_p - blank).gather(-1, predicted).squeeze(-1).clamp_min(_EPSILON)
        for blank in (without_first, without_second)
    )
    return first / (first + second)


def view_difference_by_input(share_nb: Tensor) -> float:
    """Mean over pairs of members and inputs of |share_ib − share_jb|; 0 for one member."""
    return _mean_over_pairs(share_nb)


def view_difference_on_average(share_nb: Tensor) -> float:
    """Mean over pairs of members of |share_i − share_j|; 0 for one member."""
    return _mean_over_pairs(share_nb.mean(1, keepdim=True))


def covered_views(
    member_accuracy: Sequence[float], member_accuracy_by_view: Sequence[Sequence[float]], classes: int
) -> list[bool]:
    """For each view, whether some member keeps half of its accuracy beyond chance without the other.

    Args:
        member_accuracy: (n,) on whole inputs.
        member_accuracy_by_view: (V, n) with only that view left.
        classes: C, all of which are taken to be as frequent.
    """
    chance = 1 / classes
    return [
        any(
            whole > chance and alone - chance >= _HALF * (whole - chance)
            for whole, alone in zip(member_accuracy, view, strict=True)
        )
        for view in member_accuracy_by_view
    ]


def _mean_over_pairs(x_nb: Tensor) -> float:
    n = len(x_nb)
    if n < 2:
        return 0.0
    total = (x_nb[:, None] - x_nb[None]).abs().mean(-1).sum().item()  # each pair twice, and itself at 0
    return float(total / (n * (n - 1)))
