"""A data set with two tasks of five digits each. (The tasks of `dataset=digits` have two classes.)"""

import torch
from sklearn.datasets import load_digits

from immunization.data import Origin, Split, Task, TaskPair, finish, split_rows, standardize


def digit_halves(seed: int, common_range: bool = False, name: str = "digit_halves") -> TaskPair:
    """scikit-learn's digits of 8 x 8 pixels (D = 64). D_P has the classes 0 to 4, D_H has the classes 5 to 9."""
    pixels, digits = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    generator = torch.Generator().manual_seed(seed)
    tasks = {}
    for role, first in {"primary": 0, "harmful": 5}.items():
        own = torch.nonzero((digits >= first) & (digits < first + 5))[:, 0]
        parts = split_rows(digits[own], 0.2, 0.2, generator)
        rows = {split: own[part] for split, part in parts.items()}
        splits = {s: Split(pixels[i], digits[i] - first, Origin("load_digits()", i)) for s, i in rows.items()}
        tasks[role] = Task(f"digits {first} to {first + 4}", **splits, classes=5)
    about = {"data": "scikit-learn digits", "normalize": "each pixel by its mean and std over both training splits"}
    return finish(standardize(TaskPair.of(name, tasks, about), "shared"), common_range)
