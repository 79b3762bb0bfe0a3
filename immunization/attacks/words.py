"""Text descriptors without a model: TF-IDF of words and characters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from immunization.attacks.base import AttackCurve
from immunization.attacks.kernels import Kernel, Rule
from immunization.attacks.pooling import Outputs
from immunization.attacks.predictors import logistic_regression
from immunization.attacks.readings import (
    MOST,
    Blend,
    Fit,
    Reading,
    best_fit,
    blended,
    curve_of,
    errors_of,
    fit_of,
    nested,
)
from immunization.attacks.victim import Victim, images_of
from immunization.data.task import SPLITS, Task

WORDS = {"ngram_range": (1, 2), "token_pattern": r"(?u)\b\w+\b"}
CHARACTERS = {"analyzer": "char_wb", "ngram_range": (2, 5)}
TOKENS = {"ngram_range": (1, 3), "token_pattern": r"\S+"}
"""What is counted: words and pairs of them, two to five characters of a word, or tokens where only these are known."""

STRENGTHS = (3.0, 30.0)
"""C of logistic regression: what the loss of all texts is multiplied by."""

STEPS = 200
"""Most iterations of logistic regression."""

JITTER = 1e-6
"""Added to a kernel's diagonal, relative to its mean, where coordinates are taken of it."""


def reads_texts(victim: Victim) -> bool:
    """Whether what its net reads are tokens, and no images."""
    return victim.model.deep and not victim.images("val")[0].is_floating_point()


def probe_words(victim: Victim, everything: Tensor, ridges: Sequence[float], seed: int) -> AttackCurve:
    """The curve of ridge, discriminants and logistic regression on TF-IDF, alone and as mean predictions.

    As block probes do, with growing numbers of the rows `everything`, of which it takes all. How rare a word is comes
    from all training texts, which need no labels.
    """
    task, counts = victim.task, victim.once("words", lambda: tf_idf(victim))
    nothing, blends, spent = Outputs({}, [{}]), list[Blend](), 0.0
    for rows in nested(task, everything, seed, len(everything)):
        key = ("words", *ridges, *rows.tolist())  # those of few texts are among those of more
        fits = victim.once(key, partial(word_fits, task, counts, rows, ridges))
        spent += sum(fit.flops for fit in fits)
        blends += [Blend.of(rows, [fit], fit.error, fit.val, nothing) for fit in fits]
        blends.append(blended(task, nothing, rows, fits))
    return curve_of(task, blends, nothing, spent)


def tf_idf(victim: Victim) -> dict[str, Any]:
    """Sparse rows [N, columns] by split, of squared length 2: words and characters side by side, each of length 1."""
    from scipy.sparse import hstack
    from sklearn.feature_extraction.text import TfidfVectorizer

    texts = victim.texts()
    ways = [TOKENS] if texts is None else [WORDS, CHARACTERS]
    texts = texts or {split: _as_words(x) for split, x in images_of(victim).items()}
    counters = [TfidfVectorizer(sublinear_tf=True, **way).fit(texts["train"]) for way in ways]
    return {split: hstack([counter.transform(texts[split]) for counter in counters]).tocsr() for split in SPLITS}


def _as_words(x: Tensor) -> list[str]:
    """Packed tokens [N, fields, T] as texts of their ids, without those that a mask leaves out."""
    keep = x[:, 1] > 0 if x.shape[1] > 1 else x[:, 0] >= 0
    return [" ".join(map(str, ids[own].tolist())) for ids, own in zip(x[:, 0], keep, strict=True)]


def word_fits(task: Task, counts: Mapping[str, Any], rows: Tensor, ridges: Sequence[float]) -> list[Fit]:
    """Fits on some training rows: by a linear and a Gaussian kernel, if these are not too many, and logistic ones."""
    from scipy.sparse import vstack

    train, others = counts["train"][rows.numpy()], vstack([counts["val"], counts["test"]]).tocsr()
    fits, columns = list[Fit](), train.nnz // len(rows)
    if len(rows) <= MOST:
        own, between = (torch.from_numpy((x @ train.T).toarray()) for x in (train, others))
        squares = torch.from_numpy(np.asarray(others.multiply(others).sum(1)).ravel())
        kernel = Kernel.centered(own, between, squares, columns)
        rules = [Rule(ridge, discriminant) for discriminant in (False, True) for ridge in ridges]
        for radial in (False, True):
            reading = Reading(("words",), "tf-idf", radial=radial)
            fits.append(best_fit(task, rows, reading, kernel.gaussian() if radial else kernel, rules))
        (train, others), columns = _coordinates(kernel), len(rows)
    for strength in STRENGTHS:
        predicted, steps = _logistic(train, others, task.train.y.cpu()[rows], task.classes, strength)
        error = errors_of(task, predicted[: len(task.val)]).item()
        flops = 4.0 * steps * len(rows) * columns * task.classes
        fits.append(fit_of(task, Reading(("words",), "logistic"), Rule(1 / strength), predicted, error, flops))
    return fits


def _coordinates(kernel: Kernel) -> tuple[Any, Any]:
    """Columns [n, n] of training rows and [M, n] of others that have the kernel's inner products."""
    own = kernel.own.clone()
    own.diagonal().add_(JITTER * own.diagonal().mean())
    factor = torch.linalg.cholesky(own)
    return factor.numpy(), torch.linalg.solve_triangular(factor, kernel.others.T, upper=False).T.numpy()


def _logistic(train: Any, others: Any, labels: Tensor, classes: int, strength: float) -> tuple[Tensor, int]:
    """Probabilities [M, classes] of other rows, and iterations."""
    model = logistic_regression(train, labels.numpy(), strength, STEPS)
    found = torch.zeros(others.shape[0], classes, dtype=torch.float64)
    found[:, model.classes_] = torch.from_numpy(model.predict_proba(others))
    return found, int(model.n_iter_.max())
