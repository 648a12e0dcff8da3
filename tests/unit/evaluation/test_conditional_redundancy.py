"""Conditional redundancy: its parts against their definitions, the estimate against closed forms."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from featureflock.evaluation import conditional_redundancy
from featureflock.methods.discriminators import DiscriminatorOutput, Discriminators, discriminate, partners


def correlated(rho: float, h: int, b: int, *, classes: int = 5, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Two members' features, jointly Gaussian in each class: each feature has correlation ρ with its twin.

    I(Z_1; Z_2 | Y) = −(h/2) log(1 − ρ²). The means of the classes are far apart, and the same for both members.
    """
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (b,), generator=generator)
    means = 3 * torch.randn(classes, h, generator=generator)
    common, own = torch.randn(2, b, h, generator=generator)
    return torch.stack([common, rho * common + math.sqrt(1 - rho**2) * own]) + means[y], y


def information(rho: float, h: int) -> float:
    return -h / 2 * math.log(1 - rho**2)


@pytest.mark.parametrize("classes", [1, 3, 40, 10_000])
def test_the_partner_is_the_next_example_of_the_class_cyclically(classes):
    y = torch.randint(classes, (60,), generator=torch.Generator().manual_seed(classes))
    partner, paired = partners(y)
    for b, label in enumerate(y.tolist()):
        others = [k % 60 for k in range(b + 1, b + 61) if y[k % 60] == label]
        assert partner[b] == others[0]
        assert paired[b] == (others[0] != b)


def test_discriminators_are_one_perceptron_for_each_pair():
    torch.manual_seed(0)
    n, b, h, classes = 4, 9, 5, 3
    stacked = Discriminators(n, h, classes)
    z, partner, y = torch.randn(n, b, h), torch.randperm(b), torch.randint(classes, (b,))
    pairs = [(i, j) for i in range(n) for j in range(i + 1, n)]
    positive, negative = stacked(z, partner, y)
    assert positive.shape == negative.shape == (6, b)
    for p, (i, j) in enumerate(pairs):
        layers: list[nn.Module] = []
        for weight, bias in zip(stacked.weights, stacked.biases, strict=True):
            linear = nn.Linear(*weight.shape[1:])
            linear.weight.data, linear.bias.data = weight[p].T, bias[p, 0]
            layers += [linear, nn.LeakyReLU(0.2)]
        alone = nn.Sequential(*layers[:-1])
        assert [m.out_features for m in alone if isinstance(m, nn.Linear)] == [256, 256, 100, 1]
        embedded = F.embedding(y, stacked.embedding[p])
        assert embedded.shape == (b, 64)
        for found, other in ((positive, z[j]), (negative, z[j, partner])):
            assert_close(found[p], alone(torch.cat([z[i], other, embedded], -1))[:, 0], rtol=1e-4, atol=1e-5)


def test_positives_are_one_example_and_negatives_two_of_a_class():
    """With a discriminator that encodes its two arguments."""
    y = torch.tensor([0, 1, 0, 2, 1, 0])
    z = torch.stack([torch.arange(6.0), 100 * torch.arange(6.0)])[..., None]

    def encode(z: torch.Tensor, partner: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
        return [(z[0] + second).T + 1000 * labels for second in (z[1], z[1, partner])]

    outputs = discriminate(encode, z, y)
    assert outputs.positive.tolist() == [[101 * b + 1000 * int(y[b]) for b in range(6)]]
    other = [2, 4, 5, 3, 1, 0]
    assert outputs.negative.tolist() == [[b + 100 * other[b] + 1000 * int(y[b]) for b in range(6)]]
    assert_close(outputs.weight, torch.tensor([1, 1, 1, 0, 1, 1]) / 5)


def test_the_two_losses_are_their_formulas():
    generator = torch.Generator().manual_seed(1)
    positive, negative = 8 * torch.randn(2, 3, 20, generator=generator, dtype=torch.float64)
    paired = torch.arange(20) % 4 != 0
    outputs = DiscriminatorOutput(positive, negative, paired / paired.sum())
    for p in range(3):
        pos, neg = positive[p, paired], negative[p, paired]
        targets = torch.cat([torch.ones(15), torch.zeros(15)]).double()
        expected = F.binary_cross_entropy_with_logits(torch.cat([pos, neg]), targets)
        assert_close(outputs.discrimination()[p], expected)
        f_pos, f_neg = 4 * torch.tanh(pos / 4), 4 * torch.tanh(neg / 4)
        assert_close(outputs.information(4.0)[p], f_pos.mean() - f_neg.exp().mean().log())


def test_a_batch_without_two_examples_of_a_class_has_no_loss():
    z = torch.randn(3, 5, 2, requires_grad=True)
    outputs = discriminate(Discriminators(3, 2, 5), z, torch.arange(5))
    assert (outputs.information() == 0).all()
    assert (outputs.discrimination() == 0).all()
    (outputs.information().sum() + outputs.discrimination().sum()).backward()
    assert (z.grad == 0).all()


def test_a_large_tau_does_not_overflow():
    positive = torch.full((1, 4), 900.0, requires_grad=True)
    negative = torch.tensor([[-900.0, 850.0, 900.0, 1e4]], requires_grad=True)
    outputs = DiscriminatorOutput(positive, negative, torch.tensor([1, 1, 1, 0]) / 3)
    found = outputs.information(1e6)
    assert_close(found, torch.tensor([math.log(3.0)]), rtol=0, atol=1e-2)
    found.backward()
    assert torch.isfinite(negative.grad).all()


@pytest.mark.parametrize("rho", [0.0, 0.3, 0.7])
def test_with_the_true_ratio_of_densities_the_bound_is_the_information(rho):
    h, b = 2, 100_000
    z, y = correlated(rho, h, b)
    means = torch.stack([z[:, y == label].mean(1) for label in range(5)], 1)

    def log_ratio(z: torch.Tensor, partner: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
        ratios = []
        for second in (z[1], z[1, partner]):
            a, c = z[0] - means[0, labels], second - means[1, labels]
            square = rho**2 * (a**2 + c**2) - 2 * rho * a * c
            ratios.append((-0.5 * math.log(1 - rho**2) - square / (2 * (1 - rho**2))).sum(-1)[None])
        return ratios

    found = discriminate(log_ratio, z, y).information(tau=100.0)
    assert found.item() == pytest.approx(information(rho, h), abs=0.02)


@pytest.mark.parametrize(("rho", "h"), [(0.6, 4), (0.85, 3)])
def test_the_estimate_is_close_to_the_closed_form(rho, h):
    z, y = correlated(rho, h, 6_000)
    found = conditional_redundancy(z, y, steps=150, batch=128)
    assert found[0, 1].item() == pytest.approx(information(rho, h), rel=0.15)
    assert torch.equal(found, found.T)
    assert (found.diagonal() == 0).all()


def test_information_about_the_class_is_not_redundant():
    """The class is nearly all that both members know, and all that they have in common."""
    z, y = correlated(0.0, 3, 4_000)
    means = torch.stack([z[:, y == label].mean(1) for label in range(5)], 1)
    assert torch.corrcoef(means[:, y, 0])[0, 1] > 0.99
    assert abs(conditional_redundancy(z, y, steps=50, batch=128)[0, 1].item()) < 0.02


def test_features_that_rarely_vary_do_not_dominate():
    """Independent members behind a ReLU: most features are 0 for all training examples of a class."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(10, (3000,), generator=generator)
    z = torch.relu(torch.randn(2, 3000, 16, generator=generator) - 2)
    assert abs(conditional_redundancy(z, y, steps=100, batch=128)[0, 1].item()) < 0.1


def test_each_pair_has_its_own_estimate_which_does_not_depend_on_units():
    (a, b), y = correlated(0.8, 2, 2_000)
    other = correlated(0.0, 2, 2_000, seed=1)[0][1]
    found = conditional_redundancy(torch.stack([a, other, b]), y, steps=60, batch=128)
    assert found[0, 2] > 0.6 * information(0.8, 2)
    assert abs(found[0, 1].item()) < 0.08
    again = conditional_redundancy(torch.stack([100 * a + 7, other, b / 100]), y, steps=60, batch=128)
    assert_close(again, found, rtol=0, atol=0.02)


def test_the_seed_determines_it_and_the_global_generator_is_untouched():
    z, y = correlated(0.5, 2, 500)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = conditional_redundancy(z, y, steps=20, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    with torch.inference_mode():
        assert torch.equal(conditional_redundancy(z.clone(), y, steps=20, seed=1), first)
    assert not torch.equal(conditional_redundancy(z, y, steps=20, seed=2), first)


@pytest.mark.parametrize(
    ("features", "labels", "message"),
    [
        (torch.zeros(2, 8), torch.zeros(8).long(), "members, examples, features"),
        (torch.zeros(2, 8, 3).long(), torch.zeros(8).long(), "floating-point"),
        ("features", torch.zeros(8).long(), "got str"),
        (torch.zeros(1, 8, 3), torch.zeros(8).long(), "there is only one"),
        (torch.zeros(2, 8, 3), torch.zeros(7).long(), "one for each example"),
        (torch.zeros(2, 8, 3), torch.zeros(8), "must be a tensor of integers"),
        (torch.zeros(2, 8, 3), torch.arange(8), "at least two examples of some class"),
        (torch.zeros(2, 8, 3), -torch.ones(8).long(), "from 0"),
        (torch.full((2, 8, 3), math.nan), torch.zeros(8).long(), "finite"),
    ],
)
def test_invalid_arguments_are_refused(features, labels, message):
    with pytest.raises(ValueError, match=message):
        conditional_redundancy(features, labels)


@pytest.mark.parametrize("options", [{"steps": 0}, {"batch": 1}, {"tau": 0.0}, {"tau": math.inf}])
def test_invalid_options_are_refused(options):
    with pytest.raises(ValueError, match="at least 1 step, batches of 2 and a tau above 0"):
        conditional_redundancy(*correlated(0.5, 2, 100), **options)


def test_too_few_examples_of_each_class_are_refused():
    y = torch.cat([torch.zeros(4), torch.arange(1, 9)]).long()
    with pytest.raises(ValueError, match="No two examples of the test part have the same class"):
        conditional_redundancy(torch.randn(2, 12, 3), y, steps=1, seed=1)
