"""Random predictions and labels."""

import torch


def random_predictions(b=200, c=5, seed=0, scale=2.0, members=None):
    """Log-probabilities (b, c) or (members, b, c), and labels that correlate with them."""
    g = torch.Generator().manual_seed(seed)
    shape = (b, c) if members is None else (members, b, c)
    log_p = (scale * torch.randn(shape, generator=g, dtype=torch.float64)).log_softmax(-1)
    p = log_p.exp() if members is None else log_p.exp().mean(0)
    return log_p, torch.multinomial(p.sqrt(), 1, generator=g)[:, 0]


def rows(*values):
    return torch.tensor(values, dtype=torch.float64)
