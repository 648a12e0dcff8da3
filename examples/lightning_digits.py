"""An ensemble under Lightning: handwritten digits, trained in micro-batches, calibrated and evaluated.

    pip install "featureflock[lightning]"
    python examples/lightning_digits.py                seconds on a laptop; nothing is downloaded

Flags of the Trainer work as for any module: devices=2, strategy="ddp", precision="bf16-mixed", gradient_clip_val=1.
"""

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import nll_loss
from torch.utils.data import DataLoader, TensorDataset, random_split

import featureflock as ff
from featureflock.integrations import FlockModule
from featureflock.methods import FeatureWGD

MEMBERS = 5


def extractor() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 64), nn.ReLU())


def main() -> None:
    pl.seed_everything(0)
    pixels, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels))
    train, validation, test = random_split(digits, [1197, 300, 300])
    loaders = [DataLoader(part, 32, shuffle=part is train) for part in (train, validation, test)]

    module = FlockModule(
        [extractor() for _ in range(MEMBERS)],
        nn.Linear(64, 10),  # shared by all members
        method=FeatureWGD(),
        optimiser=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
    )
    trainer = pl.Trainer(max_epochs=15, accumulate_grad_batches=2, logger=False, enable_checkpointing=False)
    trainer.fit(module, *loaders[:2])

    temperature = ff.calibrate(module.ensemble, loaders[1])
    probs = torch.cat(trainer.predict(module, loaders[2]))  # averaged over members, calibrated
    y = torch.cat([y for _, y in loaders[2]])
    print(f"temperature {temperature:.2f}")
    print(f"accuracy {100 * (probs.argmax(-1) == y).double().mean():.1f} %, NLL {nll_loss(probs.log(), y):.3f}")
    ff.save(module.ensemble, "digits-ensemble")


if __name__ == "__main__":
    main()
