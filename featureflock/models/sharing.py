"""Members that share weights, of any network: rank-one members (BatchEnsemble), and a shared trunk.

featureflock train fashion-mnist-cnn --model rank-one                          # of the recipe's network
featureflock train fashion-mnist-cnn --model shared-trunk --model.blocks 2
Recipe(model=RankOneConfig(CNNConfig(32)), method=FeatureWGD(), …)
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from featureflock.ensemble.sharing import SharedMembers, rank_one
from featureflock.models.base import MODELS, ModelConfig
from featureflock.models.cifar_resnet import CifarResNet
from featureflock.models.cnn import CNN, CNNConfig
from featureflock.models.layers import check_positive
from featureflock.models.mlp import MLP
from featureflock.models.resnet import ResNet
from featureflock.models.wide_resnet import WideResNet


class SharingConfig(ModelConfig):
    """Base class of configurations that change how members of another configuration share weights.

    On the command line, `--model NAME` changes the recipe's network, and `--model.base` chooses another one.
    """

    base: ModelConfig

    @property
    def fit_examples(self) -> int:  # type: ignore[override]
        return self.base.fit_examples

    def extractor(self, shape: tuple[int, ...]) -> nn.Module:
        return self.base.extractor(shape)

    def fit(self, extractor: nn.Module, x: Tensor) -> None:
        self.base.fit(extractor, x)

    def share(self, extractor: nn.Module, members: int) -> SharedMembers | None:
        return self.base.share(extractor, members)

    def trunk(self, shape: tuple[int, ...]) -> Callable[[], nn.Module] | None:
        return self.base.trunk(shape)

    def head(self, extractor: nn.Module, classes: int) -> nn.Module:
        return self.base.head(extractor, classes)


@MODELS.register("rank-one")
@dataclass(frozen=True)
class RankOneConfig(SharingConfig):
    """Rank-one members (BatchEnsemble): n members in the memory of one network, computed in one call."""

    base: ModelConfig = CNNConfig()
    """The network of the members."""
    std: float | None = None
    """Standard deviation of the initial vectors around 1; None for random signs ±1."""

    def __post_init__(self) -> None:
        if self.std is not None and not 0 <= self.std < float("inf"):
            raise ValueError(f"std must be a finite number of at least 0, or None for random signs; got {self.std!r}.")

    def share(self, extractor: nn.Module, members: int) -> SharedMembers:
        return rank_one(extractor, members, init="signs" if self.std is None else self.std)


@MODELS.register("shared-trunk")
@dataclass(frozen=True)
class SharedTrunkConfig(SharingConfig):
    """Members that share the first blocks of the network, which are computed once and trained by the mean gradient."""

    base: ModelConfig = CNNConfig()
    """The network of the members; one of yours needs a method `split(blocks)` that returns trunk and extractor."""
    blocks: int = 1
    """Number of blocks that all members share."""

    def __post_init__(self) -> None:
        check_positive("blocks", self.blocks)

    def extractor(self, shape: tuple[int, ...]) -> nn.Module:
        return split(self.base.extractor(shape), self.blocks)[1]

    def trunk(self, shape: tuple[int, ...]) -> Callable[[], nn.Module]:
        if self.base.trunk(shape) is not None:
            raise ValueError("The network of a shared trunk cannot have a trunk itself; give blocks once.")
        return lambda: split(self.base.extractor(shape), self.blocks)[0]


def split(network: nn.Module, blocks: int) -> tuple[nn.Module, nn.Module]:
    """Divide a network into its first blocks and the rest, which is the same module without them."""
    if hasattr(network, "split"):
        parts: tuple[nn.Module, nn.Module] = network.split(blocks)  # type: ignore[operator]
        return parts
    if isinstance(network, CNN | MLP):
        flat = isinstance(network, MLP)
        first, name, per_block = nn.Flatten() if flat else nn.Identity(), "layers", 2 if flat else 3
    elif isinstance(network, WideResNet | CifarResNet | ResNet):
        stem = "conv" if isinstance(network, WideResNet) else "stem"
        first, name, per_block = getattr(network, stem), "blocks", 1
        setattr(network, stem, nn.Identity())
    else:
        raise ValueError(
            f"A shared trunk needs a network with a method split(blocks); {type(network).__name__} has none."
        )
    modules = list(getattr(network, name))
    if blocks * per_block >= len(modules):
        raise ValueError(f"blocks must be 1 to {len(modules) // per_block - 1} for this network; got {blocks}.")
    setattr(network, name, nn.Sequential(*modules[blocks * per_block :]))
    return nn.Sequential(first, *modules[: blocks * per_block]), network
