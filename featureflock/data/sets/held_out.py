"""A data set whose test set is replaced by held-out examples."""

from dataclasses import dataclass, replace

from featureflock.data.sets.base import DATA_SETS, DataSet, Splits, check_seed
from featureflock.data.sets.digits import Digits
from featureflock.tasks import Task


@DATA_SETS.register("held-out")
@dataclass(frozen=True)
class HeldOut(DataSet):
    """Another data set, tested on held-out examples: for tuning without looking at the test set.

    The examples are taken from the training set, or from the validation set of a data set that provides one.

    On the command line, `--data held-out` holds examples out of the recipe's data.
    """

    data: DataSet = Digits()
    """The data set. Its test set is not used."""
    examples: int = 200
    """Number of examples held out for testing, balanced over classes if there are any."""
    seed: int = 0
    """Chooses the held-out examples."""

    def __post_init__(self) -> None:
        check_seed("seed", self.seed)

    @property
    def task(self) -> Task:  # type: ignore[override]
        """The task of the wrapped data set."""
        return self.data.task

    def load(self) -> Splits:
        splits = self.data.load().split(validation=self.examples, seed=self.seed)
        if splits.validation is None:
            raise ValueError(f"HeldOut needs at least 1 example to test on; got {self.examples}.")
        return replace(splits, test=splits.validation, validation=None)
