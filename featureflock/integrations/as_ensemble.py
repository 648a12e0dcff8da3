"""An ensemble from what users of training libraries have: extractors and a head, or an ensemble."""

import copy
from collections.abc import Iterable, Sequence

from torch import nn

from featureflock.ensemble.ensemble import Ensemble
from featureflock.ensemble.sharing import SharedMembers
from featureflock.methods.base import Method
from featureflock.tasks import Classification, Task


def as_ensemble(
    members: Ensemble | SharedMembers | Iterable[nn.Module],
    head: nn.Module | Sequence[nn.Module] | None,
    method: Method,
    task: Task | None,
    trunk: nn.Module | None,
    train_size: int | None,
) -> Ensemble:
    """The ensemble of extractors and heads that a method trains; an ensemble is returned as it is.

    Args:
        members: an ensemble, extractors, or members in one network (`rank_one`, `lora`).
        head: one module for methods that share it, or one per member.
        method: the method.
        task: the likelihood; None for classification.
        trunk: a module that all members share, or None.
        train_size: the number of training points; needed by weight-WGD and DICE.
    """
    if isinstance(members, Ensemble):
        given = {"head": head, "task": task, "trunk": trunk, "train_size": train_size}
        if names := [name for name, value in given.items() if value is not None]:
            raise ValueError(f"An Ensemble is complete; leave out {', '.join(names)}, or give extractors instead.")
        return members
    extractors = members if isinstance(members, SharedMembers) else list(members)
    one = isinstance(head, nn.Module) and not isinstance(head, nn.ModuleList)
    if head is None or not len(extractors):
        raise ValueError("Give an Ensemble, or extractors and a head: one module, or a list of one per member.")
    heads = [head, *(copy.deepcopy(head) for _ in extractors)][: len(extractors)] if one else list(head)  # type: ignore[arg-type]
    ens = method.assemble(extractors, heads, train_size)  # type: ignore[arg-type]
    separate = isinstance(ens.head, nn.ModuleList)
    if len(extractors) > 1 and one == separate:
        needed = f"one head per member; give a list of {len(extractors)}" if separate else "a shared head; give one"
        raise ValueError(f"{method.title} has {needed}.")
    if trunk is not None:
        ens.trunk = trunk
        ens.train()  # keeps a frozen trunk in eval mode
    if task is not None and task != Classification():
        ens.set_task(task)
    return ens
