"""Methods on small tables: `python benchmarks/tables.py [--held-out] [--methods ...] [--pairs ...] [key=value ...]`.

34 development pairs, on which defaults were chosen, and 15 held-out ones of other sources. Every pair is made from what
is at hand without a network: scikit-learn's data sets and generators, and the files of `data_root` (House Prices,
MNIST, CIFAR-10, Caltech-101, Imagenette), whose pairs are left out where these are missing. A pair is an npz file and a
run of `dataset=arrays` with its defaults. `--runs FILE` keeps every run as a line of JSON and goes on from there.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image
from sklearn import datasets
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import PolynomialFeatures

from immunization import run
from immunization.config import compose
from immunization.results.formatting import NONE, number

Table = tuple[np.ndarray, np.ndarray]
"""Inputs [N, D] and targets [N]."""
Pair = tuple[Table, Table]

METHODS = ("closed_form", "condition_number", "opt_kappa", "learning_curve")
LOG = ("method.form=log",)
"""Options of opt_kappa: the paper's own form, kappa itself, is unbounded on most tables."""
EVALUATIONS = "evaluation=[rir,definition,primary,ceiling,learning_curves,validity]"
ROOT = Path(compose().data_root)


# --- what pairs are made of -------------------------------------------------------------------------------------------


def one_vs_rest(x: np.ndarray, y: np.ndarray, primary: int, harmful: int, most: int = 10**6) -> Pair:
    """Class `primary` against as many others, and `harmful` likewise, on rows of their own."""
    rng = np.random.default_rng(0)
    rest = rng.permutation(np.flatnonzero((y != primary) & (y != harmful)))
    tables = []
    for label in (primary, harmful):
        own = rng.permutation(np.flatnonzero(y == label))[:most]
        rows, rest = np.concatenate([own, rest[: len(own)]]), rest[len(own) :]
        tables.append((x[rows], (y[rows] == label).astype(np.int64)))
    return tables[0], tables[1]


def by(mask: np.ndarray, x: np.ndarray, y: np.ndarray, other: np.ndarray | None = None) -> Pair:
    """Rows where `mask` holds, with targets `y`, and the others, with targets `other` (None: `y`)."""
    return (x[mask], y[mask]), (x[~mask], (y if other is None else other)[~mask])


def halves(x: np.ndarray, y: np.ndarray, other: np.ndarray) -> Pair:
    """Rows at random, half with targets `y`, half with `other`."""
    return by(np.random.default_rng(1).permutation(len(x)) % 2 == 0, x, y, other)


def random_features(x: np.ndarray, count: int) -> np.ndarray:
    rng = np.random.default_rng(2)
    x = (x - x.mean(0)) / np.where(x.std(0) > 0, x.std(0), 1)
    return np.maximum(x @ rng.normal(size=(x.shape[1], count)) / np.sqrt(x.shape[1]) + rng.normal(size=count), 0)


def spectra(decay_p: float, decay_h: float, turn: float, columns: int = 40, rows: int = 300) -> Pair:
    """Gaussian rows whose standard deviations fall as i^-decay, in bases that differ by a rotation of size `turn`."""
    rng = np.random.default_rng(3)
    skew = rng.normal(size=(columns, columns))
    skew = turn * (skew - skew.T) / np.sqrt(columns)
    basis = np.linalg.solve(np.eye(columns) + skew, np.eye(columns) - skew)  # Cayley
    tables = []
    for decay, turned in ((decay_p, np.eye(columns)), (decay_h, basis)):
        x = rng.normal(size=(rows, columns)) * np.arange(1.0, columns + 1) ** -decay @ turned
        tables.append((x, x @ rng.normal(size=columns) + 0.1 * x.std() * rng.normal(size=rows)))
    return tables[0], tables[1]


@cache
def breast() -> pd.DataFrame:
    return datasets.load_breast_cancer(as_frame=True).frame


@cache
def houses() -> pd.DataFrame:
    """House Prices: its numeric columns, the missing as 0."""
    return pd.read_csv(ROOT / "house_prices" / "train.csv").select_dtypes("number").drop(columns="Id").fillna(0.0)


def house_pair(columns: list[str], target: str, split: str, other: str | None = None) -> Pair:
    """Targets `target` of houses above the median of `split`, and `other` of those below, from `columns`."""
    t, inputs = houses(), houses()[columns].to_numpy(float)
    targets = (np.log1p(t[name].to_numpy(float)) for name in (target, other or target))
    return by((t[split] > t[split].median()).to_numpy(), inputs, *targets)


@cache
def mnist() -> Table:
    """4,000 images of MNIST, 16 x 16 pixels."""
    parts = []
    for kind, start in (("images-idx3", 16), ("labels-idx1", 8)):
        with gzip.open(ROOT / "mnist" / "MNIST" / "raw" / f"t10k-{kind}-ubyte.gz") as file:
            parts.append(np.frombuffer(file.read(), np.uint8, offset=start))
    images = [
        Image.fromarray(one).resize((16, 16), Image.Resampling.BOX) for one in parts[0].reshape(-1, 28, 28)[:4000]
    ]
    return np.stack([np.asarray(image, float).ravel() / 255 for image in images]), parts[1][:4000].astype(int)


@cache
def folder(name: str, side: int, most: int = 100) -> tuple[np.ndarray, np.ndarray]:
    """Images [N, side, side, 3] in [0, 1] of the training folders of `name`, and their classes."""
    images, labels = [], []
    for label, path in enumerate(sorted((ROOT / name / "train").iterdir())):
        for file in sorted(path.iterdir())[:most]:
            with Image.open(file) as image:
                images.append(np.asarray(image.convert("RGB").resize((side, side), Image.Resampling.BOX), float) / 255)
            labels.append(label)
    return np.stack(images), np.array(labels)


def statistics(images: np.ndarray) -> np.ndarray:
    """17 statistics of images: means, deviations, and gradients of their colours, darkest and lightest values."""
    flat = images.reshape(len(images), -1, 3)
    steps = [np.abs(np.diff(images, axis=axis)).mean((1, 2)) for axis in (1, 2)]
    ends = [np.quantile(flat.mean(2), q, axis=1)[:, None] for q in (0.01, 0.25, 0.5, 0.75, 0.99)]
    return np.hstack([flat.mean(1), flat.std(1), *steps, *ends])


def patches(name: str) -> Table:
    """Patches of 5 x 5 grey pixels of one of scikit-learn's photographs; the target is the pixel in the middle."""
    grey = datasets.load_sample_image(name).mean(2) / 255
    rng = np.random.default_rng(4)
    corners = zip(rng.integers(0, grey.shape[0] - 5, 500), rng.integers(0, grey.shape[1] - 5, 500), strict=True)
    cut = np.stack([grey[i : i + 5, j : j + 5].ravel() for i, j in corners])
    return np.delete(cut, 12, 1), cut[:, 12]


def buildings() -> pd.DataFrame:
    """A design of 768 buildings: 12 shapes of one volume, whose surface is wall + 2 roof; loads by a formula."""
    wall = [294.0, 318.5, 294.0, 318.5, 343.0, 416.5, 245.0, 269.5, 294.0, 318.5, 343.0, 367.5]
    roof = [110.25, 122.5, 147.0, 147.0, 147.0, 122.5] + [220.5] * 6
    glass = [(0.0, 0)] + [(area, kind) for area in (0.1, 0.25, 0.4) for kind in range(1, 6)]
    rows = [
        (504.6 / (w + 2 * r), w + 2 * r, w, r, 7.0 if r < 200 else 3.5, orientation, area, kind)
        for w, r in zip(wall, roof, strict=True)
        for orientation in (2, 3, 4, 5)
        for area, kind in glass
    ]
    t = pd.DataFrame(rows, columns=["compact", "surface", "wall", "roof", "height", "orientation", "glass", "kind"])
    noise = np.random.default_rng(5).normal(size=(2, len(t)))
    t["heating"] = 4.2 * t.height + 20 * t.glass + 0.06 * t.wall - 60 * (t.compact - 0.76) ** 2 + 2 * noise[0]
    t["cooling"] = 4.5 * t.height + 15 * t.glass + 0.05 * t.wall + 0.3 * t.orientation * t.glass + 2.5 * noise[1]
    return t


def building_pair(mask: Callable[[pd.DataFrame], pd.Series]) -> Pair:
    t = buildings()
    return by(mask(t).to_numpy(), t.iloc[:, :8].to_numpy(float), t.heating.to_numpy(), t.cooling.to_numpy())


def delays(primary: float, harmful: float, lags: int = 12) -> Pair:
    """Lags of two logistic maps with noise; the target is the next value."""
    tables = []
    for seed, rate in enumerate((primary, harmful)):
        rng, series = np.random.default_rng(seed), [0.3]
        for _ in range(499):
            series.append(float(np.clip(rate * series[-1] * (1 - series[-1]) + 0.01 * rng.normal(), 0.01, 0.99)))
        window = np.lib.stride_tricks.sliding_window_view(np.array(series), lags + 1)
        tables.append((window[:, :lags], window[:, lags]))
    return tables[0], tables[1]


def plant(split: str) -> Pair:
    """Four correlated columns of a power plant: temperature, vacuum, pressure, humidity; the target is its power."""
    rng = np.random.default_rng(6)
    temperature = rng.normal(20, 7, 900)
    vacuum = 54 + 1.45 * (temperature - 20) + rng.normal(0, 6, 900)
    pressure = 1013 - 0.4 * (temperature - 20) + rng.normal(0, 5, 900)
    humidity = 73 - 1.1 * (temperature - 20) + rng.normal(0, 12, 900)
    power = 454 - 1.98 * (temperature - 20) - 0.23 * (vacuum - 54) + 0.06 * (pressure - 1013) - 0.16 * (humidity - 73)
    x = np.stack([temperature, vacuum, pressure, humidity], 1)
    mask = {"season": temperature > 20, "random": rng.random(900) > 0.5}[split]
    return by(mask, x, power + rng.normal(0, 4, 900))


def mixture() -> Pair:
    """Concrete: seven parts that nearly add up, and an age; the target is its strength, young against old."""
    rng = np.random.default_rng(7)
    parts = rng.dirichlet([3, 1, 1, 2, 0.2, 10, 8], 800) * rng.normal(2350, 40, 800)[:, None]
    age = rng.choice([3, 7, 14, 28, 56, 90, 180, 365], 800)
    strength = 40 * np.log1p(age / 7) * parts[:, 0] / (parts[:, 0] + 2 * parts[:, 3]) + 0.02 * parts[:, 1]
    return by(age <= 28, np.hstack([parts, age[:, None]]), strength + rng.normal(0, 3, 800))


def fitted_features() -> tuple[np.ndarray, np.ndarray]:
    """Hidden layer of a net fitted to digits 0 to 4, of all digits."""
    x, y = datasets.load_digits(return_X_y=True)
    net = MLPClassifier((48,), max_iter=60, random_state=0).fit(x[y < 5] / 16, y[y < 5])
    return np.maximum(x / 16 @ net.coefs_[0] + net.intercepts_[0], 0), y


def frame(data: pd.DataFrame, target: str, split: str, other: str | None = None) -> Pair:
    """Targets of the rows above the median of `split`, and of those below; targets are no inputs."""
    inputs = data.drop(columns=[*{target, other or target}]).to_numpy(float)
    mask = (data[split] > data[split].median()).to_numpy()
    return by(mask, inputs, data[target].to_numpy(), data[other or target].to_numpy())


# --- the pairs --------------------------------------------------------------------------------------------------------

digits = cache(lambda: datasets.load_digits(return_X_y=True))
LIVING = ["LotArea", "OverallQual", "OverallCond", "YearBuilt", "TotalBsmtSF", "1stFlrSF", "2ndFlrSF", "GrLivArea"]
LIVING += ["FullBath", "HalfBath", "BedroomAbvGr", "TotRmsAbvGrd", "Fireplaces", "GarageCars", "GarageArea"]
AREAS = ["LotFrontage", "LotArea", "MasVnrArea", "BsmtFinSF1", "TotalBsmtSF", "1stFlrSF", "2ndFlrSF", "GarageArea"]

DEVELOPMENT: dict[str, Callable[[], Pair]] = {
    "digits 0-1": lambda: one_vs_rest(*digits(), 0, 1),
    "digits 3-5": lambda: one_vs_rest(*digits(), 3, 5),
    "digits 2-7": lambda: one_vs_rest(*digits(), 2, 7),
    "digits, ten classes by ink": lambda: by(digits()[0].sum(1) > 310, *digits()),
    "digits, noise added": lambda: one_vs_rest(
        digits()[0] + np.random.default_rng(0).normal(size=digits()[0].shape), digits()[1], 6, 9
    ),
    "MNIST 16 x 16, 3-8": lambda: one_vs_rest(*mnist(), 3, 8, 300),
    "MNIST 16 x 16, 4-9": lambda: one_vs_rest(*mnist(), 4, 9, 300),
    "MNIST 16 x 16, 7-1, few rows": lambda: one_vs_rest(*mnist(), 7, 1, 130),
    "MNIST 16 x 16, bits, 0-6": lambda: one_vs_rest((mnist()[0] > 0.5).astype(float), mnist()[1], 0, 6, 300),
    "MNIST 16 x 16, bits, 2-5": lambda: one_vs_rest((mnist()[0] > 0.5).astype(float), mnist()[1], 2, 5, 160),
    "breast cancer, by size": lambda: frame(breast(), "mean concavity", "mean radius"),
    "breast cancer, diagnosis and area": lambda: halves(
        breast().drop(columns=["target", "worst area"]).to_numpy(), breast().target.to_numpy(), breast()["worst area"]
    ),
    "breast cancer, ten means": lambda: frame(
        breast().iloc[:, :10], "mean symmetry", "mean texture", "mean fractal dimension"
    ),
    "diabetes, women and men": lambda: frame(datasets.load_diabetes(as_frame=True).frame, "target", "sex"),
    "diabetes, by age": lambda: frame(datasets.load_diabetes(as_frame=True).frame, "target", "age", "bmi"),
    "diabetes, squares": lambda: by(
        datasets.load_diabetes().data[:, 1] > 0,
        PolynomialFeatures(2, include_bias=False).fit_transform(datasets.load_diabetes().data * 20),
        datasets.load_diabetes().target,
    ),
    "House Prices, 15 columns by age": lambda: house_pair(LIVING, "SalePrice", "YearRemodAdd"),
    "House Prices, 15 columns by lot": lambda: house_pair(LIVING, "SalePrice", "LotFrontage", "MasVnrArea"),
    "House Prices, 8 areas": lambda: house_pair(AREAS, "SalePrice", "YearBuilt", "GrLivArea"),
    "House Prices, 8 areas, one price": lambda: house_pair(AREAS, "SalePrice", "OverallQual"),
    "House Prices, 4 columns": lambda: house_pair(
        ["LotArea", "GrLivArea", "YearBuilt", "GarageArea"], "SalePrice", "MoSold"
    ),
    "buildings, by orientation": lambda: building_pair(lambda t: t.orientation > 3),
    "buildings, by height": lambda: building_pair(lambda t: t.height > 5),
    "buildings, by glass": lambda: building_pair(lambda t: t.glass > 0.2),
    "Friedman 1, two halves": lambda: (
        datasets.make_friedman1(400, 10, noise=0.5, random_state=0),
        datasets.make_friedman1(400, 10, noise=0.5, random_state=1),
    ),
    "Friedman 2, by its first column": lambda: by(
        (x := datasets.make_friedman2(600, noise=10.0, random_state=0))[0][:, 0] > 50, *x
    ),
    "low rank, other bases": lambda: (
        datasets.make_regression(300, 30, n_informative=10, effective_rank=5, noise=0.01, random_state=0),
        datasets.make_regression(300, 30, n_informative=10, effective_rank=12, noise=0.01, random_state=1),
    ),
    "classes on 17 columns": lambda: (
        datasets.make_classification(400, 17, n_informative=5, n_redundant=4, random_state=0),
        datasets.make_classification(400, 17, n_informative=5, n_redundant=4, random_state=1),
    ),
    "spectra, flat and steep": lambda: spectra(0.2, 1.5, 1.0),
    "spectra, steep and flat": lambda: spectra(1.5, 0.2, 1.0),
    "spectra, steep, aligned": lambda: spectra(2.0, 2.0, 0.05),
    "spectra, steep, turned": lambda: spectra(2.0, 2.0, 2.0, columns=16),
    "random features of digits": lambda: one_vs_rest(random_features(digits()[0], 96), digits()[1], 4, 7),
    "features of a net, 8-9": lambda: one_vs_rest(*fitted_features(), 8, 9),
}

HELD_OUT: dict[str, Callable[[], Pair]] = {
    "CIFAR-10 8 x 8 gray, plane-truck": lambda: one_vs_rest(*grey("cifar10", 8), 0, 9),
    "CIFAR-10 16 x 16 gray, cat-ship": lambda: one_vs_rest(*grey("cifar10", 16, 300), 3, 8),
    "Caltech-101 16 x 16 gray, by class": lambda: by(grey("caltech101", 16, 30)[1] % 2 == 0, *bright("caltech101")),
    "Imagenette 16 x 16 gray, 0-6": lambda: one_vs_rest(*grey("imagenette224", 16, 200), 0, 6),
    "Imagenette, 17 statistics": lambda: one_vs_rest(
        statistics(folder("imagenette224", 64, 200)[0]), folder("imagenette224", 64, 200)[1], 3, 8
    ),
    "CIFAR-10, 17 statistics": lambda: one_vs_rest(
        statistics(folder("cifar10", 32, 300)[0]), folder("cifar10", 32, 300)[1], 6, 1
    ),
    "wine, by proline": lambda: frame(
        datasets.load_wine(as_frame=True).frame.drop(columns="target"), "alcohol", "proline"
    ),
    "wine, by hue": lambda: frame(
        datasets.load_wine(as_frame=True).frame.drop(columns="target"), "flavanoids", "hue", "ash"
    ),
    "photographs, 24 pixels": lambda: (patches("china.jpg"), patches("flower.jpg")),
    "power plant, by season": lambda: plant("season"),
    "power plant, two halves": lambda: plant("random"),
    "concrete, young and old": mixture,
    "logistic maps, 12 lags": lambda: delays(3.7, 3.95),
    "Friedman 3, by its third column": lambda: by(
        (x := datasets.make_friedman3(600, noise=0.05, random_state=0))[0][:, 2] > 0.5, *x
    ),
    "uncorrelated and redundant, 9 columns": lambda: (
        datasets.make_sparse_uncorrelated(400, 9, random_state=0),
        datasets.make_regression(400, 9, n_informative=6, effective_rank=4, noise=0.01, random_state=2),
    ),
}


def grey(name: str, side: int, most: int = 100) -> Table:
    images, labels = folder(name, side, most)
    return images.mean(3).reshape(len(images), -1), labels


def bright(name: str) -> Table:
    """Grey pixels of half of an image; the target is the mean of the other half."""
    x = folder(name, 16, 30)[0].mean(3)
    return x[:, :, :8].reshape(len(x), -1), x[:, :, 8:].mean((1, 2))


# --- the runs ---------------------------------------------------------------------------------------------------------


def runs(
    pairs: dict[str, Callable[[], Pair]], methods: list[str], options: list[str], file: Path | None
) -> Iterator[dict]:
    """A line for each pair and method: those of `file` that are of the same options, and what is missing of them."""
    known = [json.loads(line) for line in file.read_text().splitlines()] if file and file.exists() else []
    found = {(line["pair"], line["method"]): line for line in known if line["options"] == options}
    for name, make in pairs.items():
        missing = [method for method in methods if (name, method) not in found]
        if missing:
            try:
                made = make()
            except FileNotFoundError:
                print(f"{name}: left out, {ROOT} lacks its files")
                continue
            with tempfile.TemporaryDirectory() as place:
                path = Path(place, "pair.npz")
                (primary_x, primary_y), (harmful_x, harmful_y) = made
                np.savez(path, primary_x=primary_x, primary_y=primary_y, harmful_x=harmful_x, harmful_y=harmful_y)
                for method in missing:
                    given = [f"dataset.path={path}", f"method={method}", *(LOG if method == "opt_kappa" else ())]
                    line = {"pair": name, "method": method, "options": options}
                    found[name, method] = line | measured([*given, *options], Path(place, method))
                    if file:
                        with file.open("a") as out:
                            out.write(json.dumps(found[name, method]) + "\n")
        yield from (found[name, method] for method in methods)


def measured(overrides: list[str], place: Path) -> dict:
    quiet = ["dataset=arrays", "tracker=none", "figures=false", EVALUATIONS]
    with redirect_stdout(StringIO()):
        result = run([*quiet, *overrides], folder=place, quiet=True)
    flags = [flag for flag in result.flags if not flag.startswith(("rank_deficient", "ridge", "few_samples"))]
    return {"metrics": result.metrics, "flags": flags, "seconds": result.seconds["immunize"]}


COLUMNS = {
    "(i)": "ratio_harmful",
    "(ii)": "ratio_primary",
    "RIR": "rir",
    "RIR*": "ceiling/rir",
    "harmful": "steps_ratio/harmful",
    "primary": "steps_ratio/primary",
}


def show(line: dict) -> str:
    metrics = line["metrics"]
    cells = [NONE if metrics.get(name) is None else number(metrics[name]) for name in COLUMNS.values()]
    holds = metrics.get("definition/immunized")
    cells.append(NONE if holds is None else "yes" if holds else "no")
    return " | ".join([line["pair"], line["method"], *cells, ", ".join(line["flags"])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--pairs", nargs="+", default=[], help="parts of the names of pairs")
    parser.add_argument("--runs", type=Path)
    parser.add_argument("options", nargs="*", help="overrides of every run")
    args = parser.parse_intermixed_args()
    pairs = HELD_OUT if args.held_out else DEVELOPMENT
    pairs = {name: make for name, make in pairs.items() if not args.pairs or any(part in name for part in args.pairs)}
    heads = ["pair", "method", *COLUMNS, "Definition 3.1", "flags"]
    print(f"| {' | '.join(heads)} |\n|---|---|{'---:|' * len(COLUMNS)}---|---|")
    lines = []
    for line in runs(pairs, args.methods, args.options, args.runs):
        lines.append(line)
        print(f"| {show(line)} |", flush=True)
    print()
    for method in args.methods:
        own = [line["metrics"] for line in lines if line["method"] == method]
        holds = sum(bool(m.get("definition/immunized")) for m in own)
        primary = sum((m.get("steps_ratio/primary") or 0) <= 1 for m in own)
        print(f"{method}: Definition 3.1 on {holds} of {len(own)}, primary probe not slower on {primary}")


if __name__ == "__main__":
    main()
