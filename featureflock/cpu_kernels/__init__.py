"""Optional C kernels for CPUs: faster 3×3 convolutions in networks compiled by torch.compile."""
