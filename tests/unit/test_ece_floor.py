"""results/ece_floor.py: ECE of predictions that are calibrated by construction."""

from pathlib import Path

import pytest
import safetensors.torch
import torch


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "results"))
    import ece_floor

    return ece_floor


def _stored(path, examples, confidence, accuracy):
    """Two equal members that give class 0 this probability, right in this fraction of the examples."""
    log_probs = torch.tensor([confidence, 1 - confidence]).log().expand(2, examples, 2).contiguous()
    labels = (torch.arange(examples) >= accuracy * examples).long()
    safetensors.torch.save_file({"log_probs": log_probs, "labels": labels}, path)
    return path


def test_the_floor_is_the_expected_difference_of_two_frequencies(script, tmp_path):
    """One bin: the temperature is fitted to the frequency in one half, and ECE of the other is their difference.

    Each frequency of N/2 = 500 examples has variance p (1 − p) / 500, and E|x| = σ √(2/π) for a normal x.
    """
    file = _stored(tmp_path / "clean.safetensors", 1_000, 0.8, 0.8)
    generator = torch.Generator().manual_seed(1)
    measured, floors = script.measured_and_floor(file, 300, generator)
    expected = (2 * 0.8 * 0.2 / 500) ** 0.5 * (2 / torch.pi) ** 0.5
    assert torch.tensor(floors).mean().item() == pytest.approx(expected, rel=0.1)
    assert measured == pytest.approx(expected, rel=0.5)  # five shuffles of one set of labels


def test_temperature_scaling_comes_before_the_draw(script, tmp_path):
    """Overconfident predictions have the same floor as calibrated ones, once they are scaled."""
    floors = []
    for k, confidence in enumerate((0.8, 0.99)):
        file = _stored(tmp_path / f"{k}.safetensors", 1_000, confidence, 0.8)
        floors.append(script.measured_and_floor(file, 50, torch.Generator().manual_seed(0))[1])
    assert floors[0] == pytest.approx(floors[1], abs=1e-3)
