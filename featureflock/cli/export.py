"""featureflock export: write the calibrated prediction of a trained run to one file."""

import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import tyro
from torch import Tensor

from featureflock.cli.terminal import make_console
from featureflock.data import InputFormat
from featureflock.evaluation.classify import run_temperature
from featureflock.evaluation.predictions import Predictor
from featureflock.evaluation.runs import TrainedRun, read_run
from featureflock.integrations.export import check_export_path, export
from featureflock.tasks import Classification
from featureflock.training import ComputeConfig


@dataclass(frozen=True)
class Options:
    """Write the calibrated prediction of a trained run, averaged over members, to one file for onnxruntime or PyTorch.

    The file takes inputs as they are, because normalisation is a part of it: images as bytes (uint8) from 0 to 255 of
    shape (batch, channels, height, width), in the size that the network was trained on; rows of a table as float32 in
    the units and the order of the training data. Its outputs are `probabilities`, or `mean` and `variance` of
    regression. Probabilities of classes are calibrated as by `featureflock predict`.
    """

    run: Annotated[Path, tyro.conf.arg(metavar="RUN"), tyro.conf.Positional]
    """Run folder, as made by `featureflock train`."""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("model.onnx")
    """File to write: .onnx for onnxruntime, .pt2 for torch.export.load."""


def main(args: list[str]) -> None:
    """Run `featureflock export` with these arguments."""
    options = tyro.cli(Options, prog="featureflock export", args=args)
    try:
        check_export_path(options.out)
    except ImportError as error:
        raise ValueError(str(error)) from error
    run = read_run(options.run)
    inputs = run.inputs
    ens, example, calibration = run.load_ensemble(), _example(inputs), ""
    if ens.task.kind == Classification.kind and ens.predict(inputs.network_inputs(example)).ndim == 2:
        ens.temperature, calibration = _temperature(run)
    export(ens, options.out, example, preprocess=inputs.network_inputs)
    shape = ", ".join(map(str, ("batch", *inputs.shape)))
    unit = " from 0 to 255" if example.dtype == torch.uint8 else ""
    make_console().print(f"wrote {options.out}: input {inputs.dtype}{unit} ({shape}){calibration}", soft_wrap=True)


def _temperature(run: TrainedRun) -> tuple[Tensor, str]:
    """The temperature of `featureflock predict`, and a note on its source."""
    predictor = Predictor(run, ComputeConfig(device="cpu"))
    temperature, source = run_temperature(run, predictor, partial(print, file=sys.stderr))
    return torch.tensor(temperature), f"; calibrated on {source} (temperature {temperature:.3f})" if source else ""


def _example(inputs: InputFormat) -> Tensor:
    """Two random inputs of a format."""
    generator = torch.Generator().manual_seed(0)
    shape, dtype = (2, *inputs.shape), getattr(torch, inputs.dtype)
    if not dtype.is_floating_point:
        return torch.randint(256 if dtype == torch.uint8 else 1, shape, generator=generator).to(dtype)
    x = torch.randn(shape, generator=generator, dtype=dtype)
    if (norm := inputs.normalisation) is None:
        return x
    return norm.mean_input(inputs.shape) + x * replace(norm, mean=norm.std).mean_input(inputs.shape)
