"""Deep-ensemble equivalent (Ashukha et al., 2020): the size of Deep Ensembles with the same calibrated likelihood.

    DEE = min { l ≥ 1 : CLL_DE(l) ≥ CLL }

CLL is the calibrated log-likelihood, the negative of the cross-validated NLL, and CLL_DE(l) that of Deep Ensembles with
l members, interpolated linearly between the measured sizes, so l is a real number. An ensemble of k members with DEE
above k is better than k independent networks.
"""

import math
from collections.abc import Mapping
from itertools import pairwise


def deep_ensemble_equivalent(log_likelihood: float, deep_ensembles: Mapping[int, float]) -> float:
    """DEE of a calibrated log-likelihood.

    Args:
        log_likelihood: calibrated log-likelihood of the ensemble, in nats per example.
        deep_ensembles: the same of Deep Ensembles, by number of members, starting with 1.

    Returns:
        The DEE; 1 if one network is as good, math.inf if no measured size is.
    """
    curve = sorted(deep_ensembles.items())
    if not curve or curve[0][0] != 1:
        raise ValueError(f"The curve of Deep Ensembles must start with 1 member; got sizes {sorted(deep_ensembles)}.")
    if not all(math.isfinite(x) for x in (log_likelihood, *deep_ensembles.values())):
        raise ValueError(f"Log-likelihoods must be finite; got {log_likelihood} and the curve {dict(curve)}.")
    if log_likelihood <= curve[0][1]:
        return 1.0
    for (l0, y0), (l1, y1) in pairwise(curve):
        if y1 >= log_likelihood:  # and y0 < log_likelihood, or an earlier pair had reached it
            return l0 + (l1 - l0) * (log_likelihood - y0) / (y1 - y0)
    return math.inf
