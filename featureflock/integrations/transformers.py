"""transformers and accelerate: an ensemble that `Trainer` and `Accelerator` train, with batches as dictionaries.

    from featureflock.integrations.transformers import FlockModel, pretrained_members

    members = pretrained_members(AutoModel.from_pretrained(name), 4)         # features of texts, (B, H)
    model = FlockModel(members, nn.Linear(384, 2), method=FeatureWGD())
    Trainer(model, TrainingArguments(gradient_accumulation_steps=4), train_dataset=…, data_collator=…).train()
    model.save_pretrained("folder")
    model = FlockModel.from_pretrained("folder")

The update of a step is that of the whole batch, also if the batch is divided among processes and micro-batches
(batch_loss.py). accelerate knows which micro-batch is the last of a step.

Shapes: n members, B examples, T tokens, H features, C classes.
"""

import copy
import inspect
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from featureflock.core import KERNELS, PRIORS, RULES
from featureflock.ensemble import module_codec
from featureflock.ensemble.ensemble import Ensemble
from featureflock.ensemble.saving import load, save
from featureflock.ensemble.sharing import SharedMembers
from featureflock.integrations.as_ensemble import as_ensemble
from featureflock.integrations.batch_loss import BatchLoss
from featureflock.integrations.chained_optimiser import ChainedOptimiser
from featureflock.methods import FeatureWGD, Method
from featureflock.methods.base import METHODS
from featureflock.tasks import Task
from featureflock.utils import serialization
from featureflock.utils.files import write_atomically
from featureflock.utils.json_files import parse_json, read_json

try:
    from accelerate.state import AcceleratorState, GradientState, is_initialized
    from transformers import AutoConfig, PreTrainedConfig
    from transformers.utils import ModelOutput
except ImportError as error:
    message = 'FlockModel needs transformers and accelerate; run pip install "featureflock[transformers]".'
    raise ImportError(message) from error

_METHOD = "method.json"
_SHARDED = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "TP")
"""Kinds of parallelism of accelerate in which a process has a part of the weights."""


@dataclass
class FlockOutput(ModelOutput):
    """Output of a `FlockModel`: the loss alone in training, the prediction otherwise."""

    loss: Tensor | None = None
    """In training what to back-propagate; otherwise the NLL of the ensemble, if there are labels."""
    logits: Tensor | None = None
    """Of the calibrated prediction, averaged over members: log-probabilities of classes (B, C), logits of labels
    (B, L), or means of regression (B, D)."""
    variance: Tensor | None = None
    """Predictive variance of regression."""


class _Forward:
    """`FlockModel.forward`, with the parameters of the trunk or extractor, by which Trainer selects columns."""

    def __get__(self, model: "FlockModel | None", owner: type) -> Any:
        def forward(self: "FlockModel", labels: Tensor | None = None, **inputs: Any) -> FlockOutput:
            return self.compute(labels, **inputs)

        if model is None:
            return forward
        parameters = inspect.signature(model.input_module.forward).parameters
        names = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
        everything = inspect.Parameter("inputs", inspect.Parameter.VAR_KEYWORD)
        named = [inspect.Parameter(name, positional) for name in ("self", *names, "labels")]
        forward.__signature__ = inspect.Signature([*named, everything])  # type: ignore[attr-defined]
        return MethodType(forward, model)


class FlockModel(nn.Module):
    """An ensemble with the interface of the models of transformers: `model(**batch)` returns loss and logits.

    The entry "labels" of a batch is the targets; the others are keyword arguments of the trunk or the extractors. If
    gradients are accumulated and members interact, all micro-batches of a step are computed when the last of them is
    given, and the loss of the others is zero.

    Args:
        members: the extractors, members in one network (`rank_one`, `lora`), or a complete `Ensemble`.
        head: one module for methods that share it, otherwise a list of one per member.
        method: how the ensemble is trained.
        task: the likelihood, such as `tasks.Regression()`; None for classification.
        trunk: a module that all members share, or None.
        train_size: number of training examples; needed by weight-WGD and DICE.
    """

    accepts_loss_kwargs = False  # Trainer then divides the loss by the number of micro-batches
    forward = cast(Callable[..., Any], _Forward())

    def __init__(
        self,
        members: Ensemble | SharedMembers | Iterable[nn.Module],
        head: nn.Module | Sequence[nn.Module] | None = None,
        *,
        method: Method = FeatureWGD(),
        task: Task | None = None,
        trunk: nn.Module | None = None,
        train_size: int | None = None,
    ) -> None:
        super().__init__()
        self.ensemble = as_ensemble(members, head, method, task, trunk, train_size)
        self.method = method
        self._loss = BatchLoss(self.ensemble, method)

    def compute(self, labels: Tensor | None = None, **inputs: Any) -> FlockOutput:
        """`forward`: the loss of a training step, or the calibrated prediction and its NLL."""
        if self.training:
            return FlockOutput(loss=self._training_loss(labels, inputs))
        ens, task = self.ensemble, self.ensemble.task
        members = ens.member_predictions(**inputs)
        calibrated = task.calibrated(members, ens.calibration)
        loss = None if labels is None else task.nll(calibrated, labels).sum() / task.count(labels)
        prediction = task.predict(members, ens.calibration)
        return FlockOutput(loss, *prediction) if isinstance(prediction, tuple) else FlockOutput(loss, calibrated[0])

    def optimiser(self, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> torch.optim.Optimizer:
        """One optimiser for all parameters, for methods such as DICE that add their own to the one that `make` makes.

        Trainer(model, …, optimizers=(model.optimiser(lambda p: torch.optim.AdamW(p, lr=1e-4)), None))
        """
        optimisers = self.method.optimisers(self.ensemble, make)
        return optimisers[0] if len(optimisers) == 1 else ChainedOptimiser(optimisers)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Save the ensemble, with the configurations of its models of transformers, and the method."""
        save(self.ensemble, folder)
        text = json.dumps(serialization.to_json(self.method), indent=1)
        write_atomically(Path(folder) / _METHOD, text.encode())

    @classmethod
    def from_pretrained(
        cls, folder: str | os.PathLike[str], *, method: Method | None = None, into: Ensemble | None = None
    ) -> "FlockModel":
        """Load what `save_pretrained` wrote, in eval mode; no code is loaded from the folder.

        Args:
            folder: the folder.
            method: a method instead of the saved one.
            into: an ensemble that your code has built, to load the weights into, as in `load`.
        """
        ens, path = load(folder, into), Path(folder) / _METHOD
        if method is None:
            if not path.is_file():
                raise ValueError(f"{folder} has no {_METHOD}, because FlockModel did not write it; pass method=….")
            method = read_json(path, Method, "pass method=…", find_class=_find_component)
        return cls(ens, method=cast(Method, method)).eval()

    @property
    def input_module(self) -> nn.Module:
        """The module that gets the inputs: the trunk, an extractor, or the network of all members."""
        ens = self.ensemble
        first = ens.extractors if isinstance(ens.extractors, SharedMembers) else ens.extractors[0]
        first = first if ens.trunk is None else ens.trunk
        return cast(nn.Module, getattr(first, "input_module", first))

    def train(self, mode: bool = True) -> "FlockModel":
        """Set train or eval mode; eval mode forgets the micro-batches of a step that was not completed."""
        if not mode:
            self._loss.clear()
        return super().train(mode)

    def _training_loss(self, labels: Tensor | None, inputs: dict[str, Any]) -> Tensor:
        if not isinstance(labels, Tensor):
            advice = "leave out Trainer's compute_loss_func"
            raise ValueError(f'FlockModel computes the loss of training, from targets under "labels"; {advice}.')
        if getattr(self, "_is_replica", False):
            raise ValueError("FlockModel does not support nn.DataParallel; start one process per GPU with torchrun.")
        if is_initialized() and AcceleratorState().distributed_type.name in _SHARDED:
            name = AcceleratorState().distributed_type.name
            raise ValueError(f"FlockModel does not support {name}; use DistributedDataParallel, accelerate's default.")
        state = GradientState()
        if not state.sync_gradients and state.plugin_kwargs.get("sync_each_batch", False):
            raise ValueError("FlockModel computes a step when its last micro-batch arrives; leave out sync_each_batch.")
        return self._loss(inputs, labels, last=state.sync_gradients).backward


class SentenceFeatures(nn.Module):
    """Features of a text, (B, H): the mean of the last hidden states of a model over tokens that are not padded.

    The pooler of the model, which has no part in them, is frozen.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        if isinstance(pooler := getattr(model, "pooler", None), nn.Module):
            pooler.requires_grad_(False)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        hidden: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask, **types).last_hidden_state
        if attention_mask is None:
            return hidden.mean(-2)
        weight = (attention_mask / attention_mask.sum(-1, keepdim=True).clamp_min(1))[..., None]
        return (hidden * weight.to(hidden.dtype)).sum(-2)


def pretrained_members(model: nn.Module, members: int, *, noise: float = 0.02, seed: int = 0) -> list[nn.Module]:
    """Extractors of texts: copies of a pretrained model that differ by a little noise.

    Equal members would not repel each other. The noise of each tensor is relative to its standard deviation.
    """
    generator = torch.Generator().manual_seed(seed)
    extractors: list[nn.Module] = [SentenceFeatures(copy.deepcopy(model)) for _ in range(members)]
    with torch.no_grad():
        for p in (p for extractor in extractors for p in extractor.parameters() if p.requires_grad and p.numel() > 1):
            p.add_(noise * p.std() * torch.randn(p.shape, generator=generator).to(p))
    return extractors


def _find_component(name: str) -> type:
    for registry in (METHODS, PRIORS, KERNELS, RULES):
        for component in registry.values():
            if component.__name__ == name:
                return cast(type, component)
    raise ValueError(f"The saved method has a component {name} that is not registered; pass method=….")


def _is_config(value: Any) -> bool:
    """Whether a value is a configuration that transformers can rebuild by its type."""
    try:
        return isinstance(value, PreTrainedConfig) and type(AutoConfig.for_model(value.model_type)) is type(value)
    except ValueError:  # of a model that is not part of transformers
        return False


def _encode_config(config: Any) -> Any:
    return {
        "attention": config._attn_implementation,
        "config": parse_json(config.to_json_string(use_diff=False), "the configuration"),
    }


def _decode_config(saved: Any) -> Any:
    fields = dict(saved["config"])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    config._attn_implementation = saved["attention"]
    return config


module_codec.OBJECTS[__name__] = module_codec.ObjectCodec(_is_config, _encode_config, _decode_config)
module_codec.LIBRARIES.add("transformers")
