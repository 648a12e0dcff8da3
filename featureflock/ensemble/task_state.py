"""The part of an ensemble that its task defines: the task, its calibration and a learnt variance."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from featureflock.tasks import Classification, Task

_CALIBRATIONS = ("temperature", "variance_scale")


class TaskState(nn.Module):
    """Base class of `Ensemble`: a module with a task.

    The calibration is a buffer, in the state_dict: `temperature` of classes and labels, `variance_scale` of regression;
    1 until `featureflock.calibrate` or the user sets it. A learnt variance is the parameter `log_variance`.
    """

    task: Task = Classification()
    """The likelihood."""
    log_variance: nn.Parameter | None
    """Learnt log-variance of `Regression`: one number with a shared head, one per member otherwise; else None."""
    temperature: Tensor
    """T of the predictions of classes and labels, p_T = softmax(log p̄ / T)."""
    variance_scale: Tensor
    """Factor of the predictive variance of regression."""

    def extra_repr(self) -> str:
        return f"task={self.task}"

    def set_task(self, task: Task) -> None:
        """Replace the task. Its learnt variance, if any, and its calibration start from their initial values."""
        if not isinstance(task, Task):
            raise ValueError(f"task must be a Task, such as tasks.Classification(); got {type(task).__name__}.")
        like = next((p for p in self.parameters() if p.is_floating_point()), torch.empty(()))
        members = len(self.head) if isinstance(self.head, nn.ModuleList) else None
        for name in _CALIBRATIONS:
            self._buffers.pop(name, None)
        self.task = task
        self.register_buffer(task.calibration, torch.ones((), dtype=like.dtype, device=like.device))
        initial = task.initial_log_variance(members)
        self._parameters["log_variance"] = None if initial is None else nn.Parameter(initial.to(like))

    def copy_task(self, other: "TaskState") -> None:
        """Take the task, the calibration and the learnt variance of another ensemble."""
        self.set_task(other.task)
        setattr(self, other.task.calibration, float(other.calibration))
        if other.log_variance is not None:
            self._parameters["log_variance"] = other.log_variance

    @property
    def calibration(self) -> Tensor:
        """The buffer that calibrates the predictions: `temperature` or `variance_scale`."""
        calibration: Tensor = self._buffers[self.task.calibration]  # type: ignore[assignment]
        return calibration

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _CALIBRATIONS:
            if "_buffers" not in vars(self) or name not in self._buffers:
                other = self.task.calibration
                raise ValueError(f"An ensemble for {self.task.name} has no {name}; set its {other}.")
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float | Tensor)
                or not 0 < float(value) < math.inf
            ):
                raise ValueError(f"{name} must be positive and finite; got {value}.")
            buffer = self.calibration
            value = torch.as_tensor(float(value), dtype=buffer.dtype, device=buffer.device)
        super().__setattr__(name, value)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Weights that were saved without a calibration belong to an ensemble that was not calibrated.
        state_dict.setdefault(f"{prefix}{self.task.calibration}", torch.ones_like(self.calibration))
        super()._load_from_state_dict(state_dict, prefix, *args)
