"""A plain PyTorch training loop with a custom model: feature-WGD instead of Deep Ensembles.

    python examples/own_loop.py      a few seconds on a laptop

The five lines that differ from Deep Ensembles are numbered.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import featureflock as ff  # 1


class Extractor(nn.Module):
    """Any network without its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.mix = nn.GRU(16 * 8, 48, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        maps = F.relu(self.norm(self.conv(x)))
        return self.mix(maps.permute(0, 2, 1, 3).flatten(2))[0].mean(1).relu()


torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
y = torch.tensor(labels)
train, test = (torch.tensor(rows) for rows in train_test_split(range(len(y)), random_state=0, stratify=y))
n = 5

extractors = nn.ModuleList(Extractor() for _ in range(n))
head = nn.Linear(48, 10)  # 2: for Deep Ensembles, nn.ModuleList(nn.Linear(48, 10) for _ in range(n))
layer = ff.ParticleLayer(prior=ff.Cauchy(1e-3), rank=5)  # 3
optimiser = torch.optim.SGD([*extractors.parameters(), *head.parameters()], lr=0.2, momentum=0.9, nesterov=True)

for epoch in range(12):
    for batch in train[torch.randperm(len(train))].split(64):
        features = torch.stack([f(x[batch]) for f in extractors])
        logits = head(layer(features))  # 4: for Deep Ensembles, torch.stack([h(f) for h, f in zip(heads, features)])
        loss = F.cross_entropy(logits.flatten(0, 1), y[batch].repeat(n))  # 5: for Deep Ensembles, n times this
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    print(f"epoch {epoch + 1}: loss {loss.item():.3f}")

ens = ff.Ensemble(extractors, head).eval()
probs = ens.predict(x[test])
members = (ens(x[test]).argmax(-1) == y[test]).double().mean(-1)
accuracy = (probs.argmax(-1) == y[test]).double().mean()
uncertain = ens.uncertainty(x[test]).total.argmax()
print(f"member accuracy {100 * members.min():.1f} to {100 * members.max():.1f} %")
print(f"ensemble accuracy {100 * accuracy:.1f} %")
top = probs[uncertain].topk(2).indices.tolist()
print(f"most uncertain test image: {uncertain}, a {y[test][uncertain]}, with {top} the most probable classes")
