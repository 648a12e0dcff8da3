"""A recipe that trains in a fraction of a second, all methods, and helpers to inspect runs."""

from dataclasses import replace

import torch

import featureflock as ff
from featureflock.data import Digits
from featureflock.methods import ADP, DICE, DeepEnsembles, FeatureMAP, FeatureWGD, FunctionWGD, Single, WeightWGD
from featureflock.models import CNNConfig, MLPConfig
from featureflock.training import Recipe, Reporter

SHORT = Recipe(data=Digits(), model=MLPConfig((16, 8)), method=FeatureWGD(), members=3, epochs=2, batch=50, subset=240)
CONVOLUTIONS = replace(SHORT, model=CNNConfig(2), precision="float32")
"""A run that a CPU may compile; MLPs are faster without."""
METHODS = (Single(), DeepEnsembles(), FeatureWGD(), FunctionWGD(), WeightWGD(), FeatureMAP(), ADP(), DICE())


def weights(folder) -> dict[str, torch.Tensor]:
    return dict(ff.load(folder / "ensemble").state_dict())


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class RecordingReporter(Reporter):
    def __init__(self):
        self.notes, self.lines, self.plan, self.closed, self.steps = [], [], None, 0, []

    def start(self, plan):
        self.plan = plan

    def step(self, step, averages):
        self.steps.append((step, *averages()))

    def epoch(self, line):
        self.lines.append(line)

    def log(self, text):
        self.notes.append(text)

    def close(self):
        self.closed += 1
