"""Tiny nets of transformers and torchvision with random weights, and loaders of what they read."""

from typing import Any

import torch
from torch import Tensor, nn

TEXTS = ("bert", "distilbert", "roberta", "gpt2")
IMAGES = ("vit", "convnextv2", "dinov2", "swinv2")
TORCHVISION = ("resnet18", "vit_b_16", "efficientnet_b0", "swin_t", "convnext_tiny")
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "num_labels": 4}
PIXELS = {"image_size": 32, "patch_size": 8}
WORDS = {"vocab_size": 64, "num_labels": 4}


def net(name: str) -> nn.Module:
    """A classifier of 4 classes, in eval mode."""
    import transformers as library

    torch.manual_seed(0)
    if name in TORCHVISION:
        from torchvision import models

        size = {"image_size": 32} if name == "vit_b_16" else {}
        made = models.get_model(name, weights=None, num_classes=4, **size)
        with torch.no_grad():
            for _ in range(30 if name == "efficientnet_b0" else 0):  # or its features are all but 0
                made.train()(torch.randn(16, 3, 32, 32))
            if name == "vit_b_16":  # whose head begins at 0
                made.heads.head.weight.normal_()
        return made.eval()
    kinds = {
        "bert": ("Bert", {**SMALL, **WORDS, "max_position_embeddings": 32}),
        "distilbert": ("DistilBert", {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, **WORDS}),
        "roberta": ("Roberta", {**SMALL, **WORDS, "max_position_embeddings": 34, "pad_token_id": 1}),
        "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32, **WORDS, "pad_token_id": 0}),
        "vit": ("ViT", {**SMALL, **PIXELS}),
        "convnextv2": ("ConvNextV2", {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1], "num_labels": 4}),
        "dinov2": ("Dinov2", {**{k: v for k, v in SMALL.items() if k != "intermediate_size"}, **PIXELS}),
        "swinv2": (
            "Swinv2",
            {
                "image_size": 32,
                "patch_size": 2,
                "embed_dim": 12,
                "depths": [1, 1],
                "num_heads": [2, 2],
                "num_labels": 4,
            },
        ),
    }
    kind, options = kinds[name]
    task = "SequenceClassification" if name in TEXTS else "ImageClassification"
    config = getattr(library, f"{kind}Config")(
        **options, **({"bos_token_id": 1, "eos_token_id": 2} if task[0] == "S" else {})
    )
    return getattr(library, f"{kind}For{task}")(config).eval()


def batches(name: str, classes: int, seed: int, rows: int = 120, size: int = 24) -> list[Any]:
    """Dicts of texts of different lengths or of images, or tuples for torchvision, whose labels can be learned."""
    generator, given = torch.Generator().manual_seed(seed), []
    for i in range(0, rows, size):
        y = torch.randint(classes, (size,), generator=generator)
        if name in TEXTS:
            length = 8 + i // size % 3
            ids = torch.randint(5, 20, (size, length), generator=generator) + 10 * y[:, None]
            mask = torch.ones_like(ids)
            mask[::2, -2:] = 0
            given.append(
                {"input_ids": ids.where(mask > 0, int(name == "roberta")), "attention_mask": mask, "labels": y}
            )
        else:
            x = torch.randn(size, 3, 32, 32, generator=generator) + y[:, None, None, None]
            given.append((x, y) if name in TORCHVISION else {"pixel_values": x, "labels": y})
    return given


@torch.no_grad()
def logits(model: nn.Module, batch: Any) -> Tensor:
    """What a net itself gives for a batch of `batches`."""
    if isinstance(batch, tuple):
        return model(batch[0])
    return model(**{key: value for key, value in batch.items() if key != "labels"}).logits
