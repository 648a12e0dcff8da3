"""`replace_convolutions` as a pass of torch.compile. Imports a private PyTorch API; `compile_options` works without."""

from typing import Any

from torch import fx
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from featureflock.cpu_kernels import replace_convolutions, weight_gradient, winograd

OPTION = "post_grad_custom_pre_pass"
"""Name of the option of torch.compile; AttributeError below if this version of PyTorch does not have it."""
getattr(config, OPTION)


class ReplaceConvolutions(CustomGraphPass):
    def __call__(self, graph: fx.Graph) -> None:
        replace_convolutions.replace_convolutions(graph)

    def uuid(self) -> Any:
        """Part of the key under which compiled graphs are cached."""
        return get_hash_for_files(tuple(m.__file__ for m in (replace_convolutions, weight_gradient, winograd)))
