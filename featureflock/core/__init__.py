"""The mathematics on plain tensors: priors, kernels, update rules, transport, and the particle layer."""
