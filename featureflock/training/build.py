"""Ensembles from recipes: new ones, and those of finished runs."""

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from featureflock.data import Examples, Splits, Stream, permutation
from featureflock.distributed.mesh import SINGLE_PROCESS, Mesh
from featureflock.ensemble.ensemble import Ensemble
from featureflock.ensemble.execution import eval_mode
from featureflock.ensemble.saving import load
from featureflock.tasks import Task
from featureflock.training.recipe import Recipe, UnregisteredComponentError
from featureflock.training.run_folder import RunFolder


def build(recipe: Recipe, splits: Splits, mesh: Mesh = SINGLE_PROCESS) -> Ensemble:
    """Build the ensemble of a recipe for its data, randomly initialised: the members of this process of a mesh."""
    examples, sample = splits.train, None
    if recipe.model.fit_examples:  # the inputs that models are fitted to are a function of the data only
        positions = permutation(len(examples), Stream.DATA_DEPENDENT_INIT)[: recipe.model.fit_examples].sort().values
        sample = next(iter(examples.batches([positions], torch.device("cpu")))).x
    return _build(recipe, examples.shape, splits.classes, examples.labels.numel(), sample, splits.task, mesh)


def rebuild(run: RunFolder) -> Ensemble:
    """Build the ensemble of a finished run from recipe.json and load its weights; predictions are bit-identical.

    All files of the run are verified before.
    A run with components that are not registered is loaded by `featureflock.load`, which needs their classes imported.
    """
    run.verify()
    try:
        recipe = Recipe.from_json(run.read_recipe())
    except UnregisteredComponentError:
        return load(run.ensemble)
    inputs, examples = run.read_inputs(), run.read_result()["train"]["examples"]
    ens = _build(recipe, inputs.shape, inputs.classes, examples, None, inputs.fitted(recipe.data.task))
    return load(run.ensemble, into=ens)


def parameter_count(ens: Ensemble) -> int:
    """Number of parameters of the members of all processes, and of what they share."""
    own = {p for part in (ens.extractors, ens.head) if isinstance(part, nn.ModuleList) for p in part.parameters()}
    of_members = sum(ens.mesh.members.all_gather_int(sum(p.numel() for p in own)))
    return of_members + sum(p.numel() for p in ens.parameters() if p not in own)


def training_flops(recipe: Recipe, ens: Ensemble, examples: Examples) -> float:
    """Approximate FLOPs of a training run; a backward pass takes twice as many as a forward pass."""
    x = next(iter(examples.batches([torch.arange(min(8, len(examples)))], torch.device("cpu")))).x[:1]
    if not len(x):  # unreadable; the training loop reports it
        return 0.0
    flops = 0
    if ens.trunk is not None:
        flops = forward_flops(ens.trunk, x)
        with torch.no_grad(), eval_mode(ens.trunk):
            x = ens.trunk(x)
    calls = len(ens) if isinstance(ens.extractors, nn.ModuleList) else 1  # the others are computed in one
    flops += calls * forward_flops(ens.first_local_extractor(), x)
    return 3.0 * flops * len(examples) * recipe.epochs


def forward_flops(network: nn.Module, x: Tensor) -> int:
    """FLOPs of the matrix products and convolutions in one forward pass, two for each multiply-add."""
    with torch.no_grad(), eval_mode(network), FlopCounterMode(display=False) as counter:
        network(x)
    return int(counter.get_total_flops())


def _build(
    recipe: Recipe,
    shape: tuple[int, ...],
    classes: int,
    train_size: int,
    sample: Tensor | None,
    task: Task,
    mesh: Mesh = SINGLE_PROCESS,
) -> Ensemble:
    newest: list[nn.Module] = []

    def make_extractor() -> nn.Module:
        newest[:] = [recipe.model.extractor(shape)]
        if sample is not None and len(sample):
            recipe.model.fit(newest[0], sample)
        return newest[0]

    def make_head() -> nn.Module:
        return recipe.model.head(newest[0], task.outputs(classes))

    return recipe.method.build(
        make_extractor,
        make_head,
        members=recipe.members,
        seed=recipe.seed,
        train_size=train_size,
        task=task,
        share=recipe.model.share,
        trunk=recipe.model.trunk(shape),
        mesh=mesh,
    )
