"""Export the prediction of an ensemble to one file that runs without featureflock: ONNX, or a program of torch.export.

    ff.export(ens, "model.onnx", example)
    session = onnxruntime.InferenceSession("model.onnx")
    (probs,) = session.run(["probabilities"], {"input": images})

The file contains all members, their average and the calibration: it computes what `Ensemble.predict` returns.
"""

import contextlib
import copy
import importlib
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from featureflock.ensemble.ensemble import Ensemble
from featureflock.utils.files import write_atomically

_ENDINGS = (".onnx", ".pt2")
_ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
_ONNX_LIMIT = 2**31 - 2**20
"""Bytes of weights that fit into one ONNX file."""

Preprocess = Callable[[Tensor], Tensor]


def export(
    ens: Ensemble, path: str | os.PathLike[str], example: Tensor, *, preprocess: Preprocess | None = None
) -> None:
    """Write the prediction of an ensemble to a file, for any batch size.

        ff.export(ens, "model.onnx", x)         # for onnxruntime; needs pip install "featureflock[onnx]"
        ff.export(ens, "model.pt2", x)          # for torch.export.load

    The file has one input, `input`, in the shape and type of the example, whose first dimension is the batch. Its
    outputs are named: `probabilities` of classes or labels, or `mean` and `variance` of regression, averaged over
    members and calibrated as in `Ensemble.predict`. The ensemble is not changed; its copy in the file is in eval mode,
    on the CPU. Before the file is written, its prediction of the example is compared with that of the ensemble.

    Args:
        ens: the ensemble, with any members, trunk, heads and mode of execution.
        path: a file that ends in .onnx or .pt2; an existing file is replaced.
        example: a batch of inputs (B, …).
        preprocess: a function of the input, or a module, that becomes a part of the file, such as a normalisation.
    """
    if not isinstance(ens, Ensemble):
        raise ValueError(f"export takes an Ensemble; got {type(ens).__name__}. Use Ensemble.from_models for networks.")
    path = Path(path)
    check_export_path(path)
    to_onnx = path.suffix.lower() == ".onnx"
    if not isinstance(example, Tensor):
        raise ValueError(f"export needs an example batch as one tensor; got {type(example).__name__}.")
    if example.ndim == 0 or len(example) == 0:
        raise ValueError(f"The example must be a batch (B, …) of at least one input; got shape {tuple(example.shape)}.")
    if ens.mesh.world.size > 1:
        raise ValueError(
            "The ensemble is divided among processes; save it, then export ff.load(folder) in one process."
        )
    tensors = dict(ens.named_parameters()) | dict(ens.named_buffers())
    for name, tensor in tensors.items():
        if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
            raise ValueError(f"{name} has no values yet; run the ensemble once on data before you export it.")
    if to_onnx and sum(t.nbytes for t in tensors.values()) > _ONNX_LIMIT:
        raise ValueError("An ONNX file holds at most 2 GB of weights, and this ensemble has more; export to .pt2.")
    if isinstance(preprocess, nn.Module):
        preprocess = copy.deepcopy(preprocess).cpu().eval().requires_grad_(False)
    x = example.detach().cpu()
    x = x if len(x) > 1 else x.repeat(2, *(1,) * (x.ndim - 1))  # with one row, torch.export would fix the batch size
    expected = _predict_example(ens, preprocess, x)
    with torch.no_grad(), _quiet():
        program = _trace(_Prediction(ens, preprocess), x)
        data = _onnx_file(program, [*expected]) if to_onnx else _torch_file(program)
        run = _onnx_runner(data) if to_onnx else program.module()
        for rows in (len(x), 1):
            _compare(_attempt(run, x[:rows], path), {k: v[:rows] for k, v in expected.items()}, path)
    write_atomically(path, data)


def check_export_path(path: Path) -> None:
    """Raise ValueError if a file cannot be exported to, or ImportError if a package for it is not installed."""
    if path.suffix.lower() not in _ENDINGS:
        raise ValueError(f"{path} must end in .onnx, for onnxruntime, or in .pt2, for torch.export.load.")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give a file.")
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"{path} cannot be written; give a file in a folder that exists and is writable.")
    for name in _ONNX_PACKAGES if path.suffix.lower() == ".onnx" else ():
        try:
            importlib.import_module(name)
        except ImportError as error:
            message = f'Export to ONNX needs {name}, which is not installed; run pip install "featureflock[onnx]".'
            raise ImportError(message) from error


class _Prediction(nn.Module):
    """A copy of an ensemble that maps inputs to the calibrated prediction, a dictionary of named tensors."""

    def __init__(self, ens: Ensemble, preprocess: Preprocess | None) -> None:
        super().__init__()
        self.ensemble = ens.for_inference(compile=False)
        self.ensemble.cpu().to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        self.preprocess = preprocess

    def forward(self, input: Tensor) -> dict[str, Tensor]:
        ens, x = self.ensemble, input if self.preprocess is None else self.preprocess(input)
        return _named(ens.task.predict(ens.task.member_predictions(ens(x), ens.log_variance), ens.calibration))


def _named(prediction: Any) -> dict[str, Tensor]:
    """The tensors of a prediction by name: `probabilities`, or the fields of a named tuple, `mean` and `variance`."""
    return {"probabilities": prediction} if isinstance(prediction, Tensor) else dict(prediction._asdict())


def _predict_example(ens: Ensemble, preprocess: Preprocess | None, x: Tensor) -> dict[str, Tensor]:
    """The prediction of the ensemble for the example; ValueError if the example does not fit."""
    try:
        with torch.no_grad():
            inputs = x if preprocess is None else preprocess(x)
            prediction = _named(ens.predict(inputs.to(ens.calibration.device)))
    except Exception as error:
        what = f"The example, {x.dtype} of shape {tuple(x.shape)}, does not fit the ensemble"
        raise ValueError(f"{what}: {_first_line(error)}") from error
    prediction = {name: values.cpu() for name, values in prediction.items()}
    for name, values in prediction.items():
        if len(values) != len(x):
            got = f"{len(x)} inputs give {name} of shape {tuple(values.shape)}"
            raise ValueError(f"The first dimension of the prediction must be the batch; {got}.")
        if not torch.isfinite(values).all():
            raise ValueError(f"The {name} of the example are not finite; give an example of real inputs.")
    return prediction


def _trace(model: nn.Module, x: Tensor) -> torch.export.ExportedProgram:
    try:
        return torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    except Exception as error:
        what = f"torch.export cannot export this ensemble for any batch size: {_first_line(error)}"
        raise ValueError(
            f"{what} Modules must have no control flow that depends on the values or on the batch."
        ) from error


def _torch_file(program: torch.export.ExportedProgram) -> bytes:
    file = io.BytesIO()
    torch.export.save(program, file)
    return file.getvalue()


def _onnx_file(program: torch.export.ExportedProgram, names: list[str]) -> bytes:
    try:
        exported = torch.onnx.export(
            program,
            input_names=["input"],
            output_names=names,
            dynamic_shapes=({0: "batch"},),
            dynamo=True,
            verbose=False,
        )
        assert exported is not None
        for value in (value for node in exported.model.graph.all_nodes() for value in node.outputs):
            if value.name in ("input", *names) and not value.is_graph_output():
                value.name = f"{value.name}_inner"  # names must be unique, and the exporter does not check them
        data: bytes = exported.model_proto.SerializeToString()
    except Exception as error:
        raise ValueError(f"This ensemble cannot be converted to ONNX; export to .pt2. {_first_line(error)}") from error
    return data


def _onnx_runner(data: bytes) -> Callable[[Tensor], dict[str, Tensor]]:
    import onnxruntime

    def run(x: Tensor) -> dict[str, Tensor]:
        session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        values = session.run(names, {"input": x.numpy()})
        return dict(zip(names, map(torch.from_numpy, values), strict=True))

    return run


def _attempt(run: Callable[[Tensor], dict[str, Tensor]], x: Tensor, path: Path) -> dict[str, Tensor]:
    try:
        return run(x)
    except Exception as error:
        other = (
            "convert the ensemble to float32, or export to .pt2"
            if path.suffix.lower() == ".onnx"
            else "export to .onnx"
        )
        raise ValueError(f"{path.name} would not run ({_first_line(error)}); {other}.") from error


def _compare(actual: dict[str, Tensor], expected: dict[str, Tensor], path: Path) -> None:
    """Raise ValueError if the exported prediction differs from that of the ensemble by more than rounding."""
    for name, values in expected.items():
        difference = (actual[name].double() - values.double()).abs().max()
        if not difference <= 1e-3 * values.abs().max().clamp_min(1e-6):
            what = f"{path.name} would predict other {name} than the ensemble (by up to {difference:.2g})"
            raise ValueError(f"{what}; it was not written. Does a module use random numbers in eval mode?")


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's notes on packages that are not needed, and its own deprecation warnings."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
