"""One thread: the tensors here are tiny, and threads that wait for each other are most of the time."""

import torch

torch.set_num_threads(1)
