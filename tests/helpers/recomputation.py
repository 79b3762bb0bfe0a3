"""The figures of a linear run, from its folder and the raw data: nothing of the package, and no torch.

A figure must agree as exactly as float64 determines it. Everything is computed again DRAWS times from features
X theta + 2 eps ||X|| ||theta|| G, with G standard normal, which moves singular values as LAPACK does; a figure may be
off by 3 times the largest change that this makes, and by 1e-12 of itself. The program goes another way: it compresses
each task to a k x D root, solves for c by corrected normal equations, takes its ceiling from products of singular
vectors and its norm ratios from the eigenbasis. Here singular values are those of the N x D features themselves, the
ceiling comes from a triangular solve, and steepest descent is walked step by step.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import pandas as pd
import yaml
from safetensors import safe_open
from safetensors.numpy import load_file
from scipy import linalg
from sklearn.datasets import load_digits

Array = np.ndarray
Figures = dict[str, "float | Array | None"]
"""Metrics of result.json by name and its curves as `curves/<name>`; None where there is no such figure."""

EPS, EPS32 = 2.0**-52, 2.0**-23
DRAWS = 16  # with few, all changes of one figure are small by chance now and then
SPLITS = ("train", "val", "test")
STATES = ("", "_baseline")  # after immunization; the raw inputs


@dataclass(eq=False)
class Task:
    """Inputs x[split] [N, D], regression targets or classes y[split] [N]; `classes` is 0 for a regression."""

    x: dict[str, Array]
    y: dict[str, Array]
    classes: int = 0
    eps: float = EPS  # of the dtype the inputs were stored in
    constant: bool = False  # the authors' images: one label a task

    def targets(self, split: str) -> Array:
        """Least-squares targets [N, C]: y itself, -1/+1 for two classes, else one-hot."""
        y = self.y[split]
        if self.classes > 2:
            return np.eye(self.classes)[y]
        return (2.0 * y - 1 if self.classes else y)[:, None]

    @cache  # noqa: B019
    def spectrum(self, split: str) -> Array:
        """Singular values of the inputs, descending."""
        return linalg.svdvals(self.x[split]) if len(self.x[split]) else np.zeros(1)

    def measure(self, predictions: Array) -> float:
        """Accuracy or R^2 of predictions [N, C] on the test rows."""
        y = self.y["test"]
        if not self.classes:
            return 1 - ((predictions[:, 0] - y) ** 2).sum() / ((y - y.mean()) ** 2).sum()
        return float(np.mean(predictions.argmax(1) == y if self.classes > 2 else (predictions[:, 0] > 0) == (y > 0)))

    def scores(self, predictions: Array) -> Array:
        """Hits, or squared errors of a regression, [T, N] of predictions [T, N, C] on the test rows."""
        y = self.y["test"]
        if not self.classes:
            return (predictions[..., 0] - y) ** 2
        return (predictions.argmax(-1) == y if self.classes > 2 else (predictions[..., 0] > 0) == (y > 0)).astype(float)


@dataclass
class Run:
    """What there is to compare: the figures as stored, and what they are made of."""

    config: dict
    stored: Figures
    tasks: dict[str, Task]
    theta: Array
    bias: Array | None
    omega: Array

    @cached_property
    def figures(self) -> list[Figures]:
        """Every figure, recomputed from the features as they are, then from disturbed ones."""
        return [figures(self), *(figures(self, np.random.default_rng(seed)) for seed in range(DRAWS))]


def kind_of(role: str) -> str:
    """`harmful` for `harmful_5`, a further harmful task."""
    return role.partition("_")[0]


def read(folder: Path) -> Run:
    """A completed linear run with its data, prepared by the mean, the standard deviation and the basis that it kept."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    result = json.loads((folder / "result.json").read_text())
    tensors, rows = (load_file(folder / f"{name}.safetensors") for name in ("immunized", "splits"))
    with safe_open(folder / "splits.safetensors", "np") as file:
        sources = {name: file.metadata()[name] for name in rows}
    places = [(sources[name], row) for name in rows for row in rows[name].tolist()]
    assert len(places) == len(set(places)), "a row is in two places"
    family = config["dataset"]["_target_"].rpartition(".")[2]
    prepare = {"house_prices": house_prices, "arrays": arrays}.get(family, images)
    tasks = prepare(config["dataset"], rows, sources, tensors)
    for task in tasks.values():
        task.x = {split: x @ tensors["basis"] for split, x in task.x.items()} if "basis" in tensors else task.x
    stored = result["metrics"] | {f"curves/{name}": np.array(curve["y"]) for name, curve in result["curves"].items()}
    theta, omega = (tensors[name].astype(float) for name in ("theta", "omega"))
    return Run(config, stored, tasks, theta, tensors.get("bias"), omega)


def images(
    options: dict, rows: dict[str, Array], sources: dict[str, str], tensors: dict[str, Array]
) -> dict[str, Task]:
    """digits, mnist, fashion_mnist: pixels from 0 to 1; one label a task where the tasks are the authors'."""
    authors, tasks = options["protocol"] != "one_vs_rest", {}
    for role in (name.removesuffix("/train") for name in rows if name.endswith("/train")):
        digit = options[kind_of(role)]
        digit = int(role.partition("_")[2] or digit[0]) if isinstance(digit, list) else digit
        x, y = {}, {}
        for split in SPLITS:
            pixels, labels = (part[rows[f"{role}/{split}"]] for part in images_of(sources[f"{role}/{split}"], options))
            x[split] = (pixels - tensors["mean"]) / tensors["std"]
            y[split] = np.full(len(labels), int(role != "primary")) if authors else (labels == digit).astype(int)
        tasks[role] = Task(x, y, 2, constant=authors)
    return tasks


def images_of(source: str, options: dict) -> tuple[Array, Array]:
    """Pixels [N, D] from 0 to 1 and labels [N]."""
    if source == "sklearn.datasets.load_digits()":
        pixels, labels = load_digits(return_X_y=True)
        return pixels / 16, labels
    path = Path(options["root"]).expanduser() / source
    pixels, labels = (idx(Path(str(path).replace("images-idx3", kind))) for kind in ("images-idx3", "labels-idx1"))
    return pixels.reshape(len(pixels), -1) / 255, labels


@cache
def idx(path: Path) -> Array:
    """An IDX file, packed or not: four bytes that end in the number of dimensions, these, the content."""
    content = path.read_bytes() if path.is_file() else gzip.decompress(Path(f"{path}.gz").read_bytes())
    shape = np.frombuffer(content, ">u4", content[3], 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * content[3]).reshape(shape)


def house_prices(options: dict, rows: dict[str, Array], _: object, tensors: dict[str, Array]) -> dict[str, Task]:
    """D_P: LotArea where MSZoning is not RL; D_H: SalePrice where it is. Categories as codes of the sorted strings."""
    path = Path(options["root"]).expanduser()
    table = pd.read_csv(path / "train.csv" if path.is_dir() else path, dtype=str, keep_default_na=False)
    authors, tasks = options["protocol"] == "authors", {}
    dropped = ["LotArea", "SalePrice", *([] if authors or options["keep_id"] else ["Id"])]
    for role, target in (("primary", "LotArea"), ("harmful", "SalePrice")):
        half = ((table["MSZoning"] == "RL") == (role == "harmful")).to_numpy()
        scope = half if authors or options["normalize"] == "each" else np.full(len(half), True)  # are coded together
        whole = np.full((len(half), table.shape[1] - len(dropped)), np.nan)
        for j, name in enumerate(name for name in table if name not in dropped):
            whole[scope, j] = codes(table[name].to_numpy(str)[scope])
        taken = {split: rows[f"{role}/{split}"] for split in SPLITS}
        y = table[target].to_numpy(float)
        tasks[role] = Task({split: whole[i] for split, i in taken.items()}, {split: y[i] for split, i in taken.items()})
    if not authors:
        both = np.concatenate([task.x["train"] for task in tasks.values()])
        for task in tasks.values():
            task.x = {split: x[:, (both != both[0]).any(0)] for split, x in task.x.items()}
    standardize(tasks, "each" if authors else options["normalize"], tensors)
    for task in tasks.values() if authors else ():  # float32
        task.x, task.y = ({k: v.astype(np.float32).astype(float) for k, v in own.items()} for own in (task.x, task.y))
        task.eps = EPS32
    return tasks


def codes(column: Array) -> Array:
    """Numbers, 0 where missing; or, where other text occurs, its place among the sorted texts, missing as '0'."""
    text = np.where(np.isin(column, ("", "NA", "None")), "0", column)
    try:
        return text.astype(float)
    except ValueError:
        return np.unique(text, return_inverse=True)[1].astype(float)


def arrays(
    options: dict, rows: dict[str, Array], sources: dict[str, str], tensors: dict[str, Array]
) -> dict[str, Task]:
    """Matrices of one's own, <role>_x and <role>_y, perhaps <role>_val_x and so on: npz, safetensors, or CSV files."""
    if options["path"]:
        stored = dict(np.load(options["path"])) if options["path"].endswith(".npz") else load_file(options["path"])
    else:
        tables = {role: pd.read_csv(options[f"{role}_csv"], dtype=str) for role in ("primary", "harmful")}
        order = [name for name in tables["primary"] if name != options["target"]]
        stored = {f"{role}_x": table[order].to_numpy(str).astype(float) for role, table in tables.items()}
        stored |= {f"{role}_y": table[options["target"]].to_numpy(str).astype(float) for role, table in tables.items()}
    tasks = {}
    for role in (name.removesuffix("/train") for name in rows if name.endswith("/train")):
        taken = {split: (sources[f"{role}/{split}"], rows[f"{role}/{split}"]) for split in SPLITS}
        x = {split: stored[name][own].astype(float) for split, (name, own) in taken.items()}
        y = {split: stored[f"{name[:-1]}y"].reshape(-1)[own] for split, (name, own) in taken.items()}
        labels, raw, known = stored[f"{role}_y"], stored[f"{role}_x"], []
        if options["targets"] == "classes" or (options["targets"] == "auto" and labels.dtype.kind != "f"):
            known = np.unique(labels)
        y = {split: np.searchsorted(known, own) if len(known) else own.astype(float) for split, own in y.items()}
        tasks[role] = Task(x, y, len(known), float(np.finfo(raw.dtype).eps) if raw.dtype.kind == "f" else EPS)
    standardize(tasks, options["normalize"], tensors)
    return tasks


def standardize(tasks: dict[str, Task], normalize: str, tensors: dict[str, Array]) -> None:
    """Columns by the run's means and deviations, of both tasks or of each; targets of regressions by their own."""
    for role, task in tasks.items():
        if normalize != "none":
            prefix, own = "" if normalize == "shared" else f"{role}/", task.x["train"]
            mean, std = tensors[f"{prefix}mean"], tensors[f"{prefix}std"]
            if task.eps > EPS:  # errors relative to a large mean stay when the mean goes, unless numbers are exact
                exact = (own == own[0]).all(0) | ((own == np.round(own)) & (np.abs(own) < 1 / task.eps)).all(0)
                before, after = (np.linalg.norm(part / std, axis=0) for part in (own, own - mean))
                task.eps *= max(1, np.where(exact, 0, before).max() / after.max())
            task.x = {split: (x - mean) / std for split, x in task.x.items()}
        if not task.classes:
            mean, std = (tensors[f"{role}/target_{name}"] for name in ("mean", "std"))
            task.y = {split: (y - mean) / std for split, y in task.y.items()}


def rank(sigma: Array, shape: tuple[int, ...], eps: float) -> int:
    """Number of the singular values of a matrix of that shape that are above the tolerance."""
    return int((sigma > sigma[0] * tolerance(shape, eps)).sum())


def tolerance(shape: tuple[int, ...], eps: float) -> float:
    """Numpy's for float64; sqrt(min(N, D)) eps for float32; eps for what is coarser."""
    return max(max(shape) * EPS, min(shape) ** 0.5 * min(eps, EPS32), eps)


def cut(x: Array, k: int) -> Array:
    """The matrix of rank k nearest to x."""
    u, sigma, vh = linalg.svd(x, full_matrices=False)
    return (u[:, :k] * sigma[:k]) @ vh[:k]


@dataclass
class Probe:
    """Linear probing of F = U diag(sigma) V^T [N, D], cut to its k directions, towards Y: c = U^T Y [k, C].

    The loss is 1/2 ||F w - Y||^2, its Hessian H = F^T F; the first `resolved` directions stand above rounding.
    """

    f: Array
    y: Array
    k: int
    eps: float = EPS

    def __post_init__(self) -> None:
        u, self.sigma, vh = linalg.svd(self.f, full_matrices=False)
        self.all_sigma = self.sigma
        self.sigma, self.v, self.c = self.sigma[: self.k], vh[: self.k].T, u[:, : self.k].T @ self.y
        self.resolved = int((self.sigma > self.sigma[0] * tolerance(self.f.shape, self.eps)).sum())

    def left(self, t: Array) -> Array:
        """(1 - lambda_i / lambda_1)^t [T, k]: what t steps of gradient descent with step 1/lambda_1 leave of c_i."""
        with np.errstate(divide="ignore"):
            log = np.log1p(-((self.sigma / self.sigma[0]) ** 2))
        return np.exp(t[:, None] * log)

    def descended(self, t: Array) -> Array:
        """Weights [T, D, C] after t steps from 0: in direction v_i, (1 - left_i) c_i / sigma_i."""
        with np.errstate(divide="ignore"):
            learned = -np.expm1(t[:, None] * np.log1p(-((self.sigma / self.sigma[0]) ** 2)))
        return self.v @ ((learned / self.sigma)[:, :, None] * self.c)

    def excess(self, t: Array) -> Array:
        """Training loss above its minimum after t steps, relative to that of w = 0."""
        return (self.left(t) ** 2 @ (self.c**2).sum(1)) / (self.c**2).sum()

    def least_squares(self) -> Array:
        """The weights w* [D, C] of least norm among those of least loss."""
        r = self.resolved
        return self.v[:, :r] @ (self.c[:r] / self.sigma[:r, None])

    def norm_ratio(self, steps: int) -> Array:
        """||w_t - w*|| / ||w_0 - w*|| on range(H): steepest descent with exact line search from 0 (Eq. 16).

        What is walked is w_t - w*, which keeps its digits where w_t comes close: the gradient is H (w_t - w*).
        """
        error = -self.least_squares()
        norms = [linalg.norm(error)]
        for _ in range(steps):
            gradient = self.f.T @ (self.f @ error)
            curvature = ((self.f @ gradient) ** 2).sum()
            if curvature > 0:
                error = error - (gradient**2).sum() / curvature * gradient
            norms.append(linalg.norm(self.v[:, : self.resolved].T @ error))
        return np.array(norms) / norms[0]


def figures(run: Run, rng: np.random.Generator | None = None) -> Figures:
    """Every figure, from the features as they are, or disturbed by `rng`."""
    names = run.config["evaluation"] or {}
    out: Figures = {}
    probes: dict[tuple[str, str], Probe] = {}
    test: dict[tuple[str, str], Array] = {}
    affine = run.bias is not None

    def features(task: Task, split: str, state: str, k: int | None = None) -> Array:
        """Features [N, D] of the inputs, or of the nearest matrix of rank k to them."""
        x = task.x[split] if k is None else cut(task.x[split], k)
        f = x if state else x @ run.theta + (run.bias if affine else 0)
        if rng is None:
            return f
        return f + 2 * EPS * task.spectrum(split)[0] * (
            1 if state else linalg.norm(run.theta, 2)
        ) * rng.standard_normal(f.shape)

    def ranked(task: Task, split: str, state: str) -> tuple[Array, int]:
        """Features with their rank k, that of the inputs: theta is invertible. With a bias it is their own."""
        if affine and not state:
            f = features(task, split, state)
            return f, rank(linalg.svdvals(f), f.shape, task.eps) if len(f) else 0
        k = rank(task.spectrum(split), task.x[split].shape, task.eps)
        coarse = k and task.eps > EPS  # what is below float32's rounding is no input
        return features(task, split, state, k if coarse else None), k

    for role, task in run.tasks.items():
        for state in STATES:
            f, k = ranked(task, "train", state)
            probes[role, state] = Probe(f, task.targets("train"), k, task.eps if affine and not state else EPS)
            test[role, state] = features(task, "test", state)

    # condition numbers (Eq. 15): (sigma_1 / sigma_k)^2; the released code's: of H + 1e-6 I; and on held-out inputs
    kappa, authors, held_out = {}, {}, {}
    for role in ("harmful", "primary"):
        for state in STATES:
            task, probe = run.tasks[role], probes[role, state]
            kappa[role + state] = out[f"kappa_{role}{state}"] = (probe.sigma[0] / probe.sigma[-1]) ** 2
            every = probe.all_sigma if task.eps == EPS else linalg.svdvals(features(task, "train", state))
            smallest = every[-1] if len(every) == probe.f.shape[1] else 0
            authors[role + state] = (every[0] ** 2 + 1e-6) / (smallest**2 + 1e-6)
            out[f"curves/spectrum/{role}{state.replace('_', '/')}"] = probe.sigma**2
            f, k = ranked(task, "test", state)
            if k:
                sigma = linalg.svdvals(f)
                held_out[role + state] = out[f"test/kappa_{role}{state}"] = (sigma[0] / sigma[k - 1]) ** 2
            if k and not state:
                out[f"test/rank_{role}"] = k
        out[f"rank_{role}"] = probes[role, ""].k
    for prefix, values in (("", kappa), ("authors/", authors), ("test/", held_out)):
        known = len(values) == 4
        out[f"{prefix}ratio_harmful"] = values["harmful"] / values["harmful_baseline"] if known else None
        out[f"{prefix}ratio_primary"] = values["primary"] / values["primary_baseline"] if known else None
        out[f"{prefix}rir"] = out[f"{prefix}ratio_harmful"] / out[f"{prefix}ratio_primary"] if known else None
    out |= of_further_tasks(run, probes, kappa)
    if run.config["model"]["init"] == "identity":  # any other theta_0 is not in the run folder
        ratios = [prefix + name for prefix in ("", "authors/") for name in ("rir", "ratio_harmful", "ratio_primary")]
        out |= {f"{name}_theta0": out[name] for name in ratios}

    bound = ceiling(probes["primary", "_baseline"], probes["harmful", "_baseline"], run)
    out["ceiling/rir"] = bound and bound * kappa["primary_baseline"] / kappa["harmful_baseline"]
    out["ceiling/attained"] = None
    if bound and abs(np.log(out["ceiling/rir"])) >= 1e-9:
        out["ceiling/attained"] = np.log(out["rir"]) / np.log(out["ceiling/rir"])

    # the primary task, its head retrained to its optimum; the head that the method trained
    task = run.tasks["primary"]
    measure = "accuracy" if task.classes else "r2"
    tested = can_be_tested(task)
    for state in STATES:
        predictions = test["primary", state] @ probes["primary", state].least_squares()
        out[f"primary/{measure}{state}"] = task.measure(predictions) if tested else None
        loss = ((predictions - task.targets("test")) ** 2).sum() / 2
        out[f"primary/loss{state}"] = loss / len(predictions) if tested else None
        for end, value in interval(task, predictions).items() if tested else ():
            out[f"interval/primary/{measure}{state}_{end}"] = value
    out[f"primary/head_{measure}"] = task.measure(test["primary", ""] @ run.omega.T) if tested else None

    # Definition 3.1
    holds = {"a": out["ratio_harmful"] > 1 + 1e-6, "b": out["ratio_primary"] <= 1 + 1e-6}
    out |= {"definition/primary_change": None, "definition/c": None, "definition/rir_kept": None}
    if tested:
        after, before = (out[f"primary/{measure}{state}"] for state in STATES)
        change = (after - before) / (1 if task.classes else abs(before) or 1)
        holds["c"] = change >= -names.get("definition", {}).get("tolerance", 0.01) - 1e-9
        out["definition/primary_change"], out["definition/rir_kept"] = change, out["rir"] if holds["c"] else 0.0
    out |= {f"definition/{part}": float(verdict) for part, verdict in holds.items()}
    out["definition/immunized"] = float(all(holds.values())) if tested or not all(holds.values()) else None

    # what the attacker's probe learns, step by step
    options = {"octaves": 20, "share": 0.9} | names.get("learning_curves", {})
    grid = np.array([round(2 ** (j / 4)) for j in range(4 * options["octaves"] + 1)])
    for role, task in run.tasks.items():
        curve, scores = {}, {}
        for state in STATES:
            probe, name = probes[role, state], role + state.replace("_", "/")
            if (probe.c**2).sum() > 0:
                out[f"curves/excess/{name}"] = probe.excess(grid)
            if can_be_tested(task):
                predictions = test[role, state] @ probe.descended(grid)
                curve[state] = out[f"curves/probe/{name}"] = np.array([task.measure(one) for one in predictions])
                scores[state] = task.scores(predictions)
            if "norm_ratio" in names and kind_of(role) != "benign" and np.any(probe.least_squares()):
                out[f"curves/norm_ratio/{name}"] = probe.norm_ratio(names["norm_ratio"]["steps"])
        chance = 1 / task.classes if task.classes else 0.0
        out[f"steps_ratio/{role}"] = out[f"rfd/{role}"] = None
        if not can_be_tested(task) or task.constant:
            continue
        found = intervals(task, scores, grid, chance, options["share"])
        best = curve["_baseline"].max()
        if best >= chance + 0.05:
            out[f"steps_bar/{role}"] = chance + options["share"] * (best - chance)
            out[f"steps_ratio/{role}"] = float(steps_ratio(curve, grid, chance, options["share"]))
        if best > 0.05:
            out[f"rfd/{role}"] = float(deviation(curve[""], curve["_baseline"]))
        for name in (name for name in found if out[f"{name}/{role}"] is not None):
            out |= {f"interval/{name}/{role}_{end}": value for end, value in found[name].items()}
    harmful = [role for role in run.tasks if kind_of(role) == "harmful"]
    for name in ("steps_ratio", "rfd") if len(harmful) > 1 else ():
        values = [out[f"{name}/{role}"] for role in harmful]
        out[f"worst/{name}"] = None if None in values else min(values)
    return out


def of_further_tasks(run: Run, probes: dict[tuple[str, str], Probe], kappa: Figures) -> Figures:
    """kappa, ratio and RIR of every harmful task beyond the first and of the unseen ones; the worst of the former."""
    out: Figures = {}
    primary, first = (kappa[role] / kappa[f"{role}_baseline"] for role in ("primary", "harmful"))
    ratios = {"harmful": first}
    for role in run.tasks:
        if role == "harmful" or kind_of(role) not in ("harmful", "unseen"):
            continue
        for state in STATES:
            probe = probes[role, state]
            out[f"kappa_{role}{state}"] = (probe.sigma[0] / probe.sigma[-1]) ** 2
            out[f"curves/spectrum/{role}{state.replace('_', '/')}"] = probe.sigma**2
        out[f"rank_{role}"] = probes[role, ""].k
        ratios[role] = out[f"ratio_{role}"] = out[f"kappa_{role}"] / out[f"kappa_{role}_baseline"]
        out[f"rir_{role}"] = ratios[role] / primary
    shown = [ratio for role, ratio in ratios.items() if kind_of(role) == "harmful"]
    if len(shown) > 1:
        out |= {"worst/ratio_harmful": min(shown), "worst/rir": min(shown) / primary}
    return out


def ceiling(primary: Probe, harmful: Probe, run: Run) -> float | None:
    """kappa(M), M = K_P^-1/2 K_H K_P^-1/2 over its non-zero eigenvalues; None where range(K_H) leaves range(K_P).

    With X_P V = Q R on an orthonormal basis V of its range, M has the singular values of X_H V R^-1, squared.
    """
    if harmful.k == 1:
        return 1.0
    eps = max(run.tasks[role].eps for role in ("primary", "harmful"))
    along = harmful.f @ primary.v
    left, width = harmful.f - along @ primary.v.T, harmful.f.shape[1]
    size = tolerance((len(primary.f) + len(harmful.f), width), eps) * np.linalg.norm(harmful.f, 2)
    tilt = (
        eps * width**0.5 * primary.sigma[0] * np.linalg.norm(along / primary.sigma, 2)
    )  # of directions of rounded data
    if primary.k < width and linalg.svdvals(left)[0] > max(size, tilt):
        return None
    r = np.linalg.qr(primary.f @ primary.v, mode="r")
    sigma = linalg.svdvals(linalg.solve_triangular(r.T, (harmful.f @ primary.v).T, lower=True))
    return (sigma[0] / sigma[min(harmful.k, primary.k) - 1]) ** 2


def can_be_tested(task: Task) -> bool:
    """Whether there are test rows, and R^2 exists on them."""
    y = task.y["test"]
    return len(y) > 0 and (task.classes > 0 or bool((y != y[0]).any()))


def steps_ratio(curve: dict[str, Array], grid: Array, chance: float, share: float) -> Array:
    """Steps of curves [..., T] to `share` of the way from chance to the baseline's best, over the baseline's.

    What is never reached counts as the last of the grid.
    """
    bar = chance + share * (curve["_baseline"].max(-1, keepdims=True) - chance) - 1e-12
    reached = {state: y >= bar for state, y in curve.items()}
    steps = {state: grid[np.where(y.any(-1), y.argmax(-1), -1)] for state, y in reached.items()}
    return steps[""] / steps["_baseline"]


def deviation(after: Array, before: Array) -> Array:
    """RFD of curves [..., T]: mean of (before - after) / before up to the first maximum of `before`, where that is
    above 0.05; 0 where it never is."""
    first = (before >= before.max(-1, keepdims=True) - 1e-12).argmax(-1)
    counted = (np.arange(before.shape[-1]) <= first[..., None]) & (before > 0.05)
    shares = np.divide(before - after, before, out=np.zeros_like(before), where=counted)
    return shares.sum(-1) / np.maximum(counted.sum(-1), 1)


@cache
def resamples(rows: int) -> tuple[Array, Array]:
    """1,000 resamples [1000, rows] of so many rows, and how often each row is in each."""
    drawn = np.random.default_rng(0).integers(rows, size=(1000, rows))
    return drawn, np.stack([np.bincount(one, minlength=rows) for one in drawn]).astype(float)


def intervals(
    task: Task, scores: dict[str, Array], grid: Array, chance: float, share: float
) -> dict[str, dict[str, float]]:
    """Ends of the 95 % intervals of the steps ratio and RFD over 1,000 resamples of the test rows."""
    y = task.y["test"]
    drawn, counts = resamples(len(y))
    curve = {state: counts @ some.T / len(y) for state, some in scores.items()}
    if not task.classes:
        spread = np.maximum(y[drawn].var(1, keepdims=True), np.finfo(float).tiny)
        curve = {state: 1 - errors / spread for state, errors in curve.items()}
    found = {"steps_ratio": steps_ratio(curve, grid, chance, share), "rfd": deviation(curve[""], curve["_baseline"])}
    ordered = {name: np.sort(values) for name, values in found.items()}
    return {name: {"low": float(values[25]), "high": float(values[-26])} for name, values in ordered.items()}


def interval(task: Task, predictions: Array) -> dict[str, float]:
    """Ends of the 95 % interval of the measure on the test rows: Wilson's, or of R^2 over 1,000 resamples."""
    y, share, z = task.y["test"], task.measure(predictions), 1.959964
    if task.classes:
        n = len(y)
        middle, half = share + z**2 / (2 * n), z * np.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2)
        low, high = ((middle + sign * half) / (1 + z**2 / n) for sign in (-1, 1))
        return {"low": max(0.0, low), "high": min(1.0, high)}
    drawn, _ = resamples(len(y))
    drawn = drawn[y[drawn].var(1) > 1e-9 * y.var()]  # of equal targets there is no R^2
    values = np.sort(1 - task.scores(predictions)[drawn].mean(1) / y[drawn].var(1))
    outside = int(0.025 * len(values))
    return {"low": float(values[outside]), "high": float(values[-1 - outside])}


@dataclass
class Line:
    """One figure: as stored, as recomputed, their difference and the allowed one, relative to it if it is not zero.

    Of a curve it is the point that is worst.
    """

    name: str
    stored: float | None
    value: float | None
    difference: float
    allowed: float

    @property
    def agrees(self) -> bool:
        return self.difference <= self.allowed


def compare(run: Run) -> list[Line]:
    """A line for each figure of result.json that is recomputed."""
    values, *disturbed = run.figures
    known = (name for name in run.stored if name in values)
    return [line(name, run.stored[name], values[name], [one[name] for one in disturbed]) for name in known]


def line(name: str, stored: float | Array | None, value: float | Array | None, disturbed: list) -> Line:
    if stored is None or value is None or np.shape(stored) != np.shape(value):
        same = stored is None and value is None
        first = [None if x is None else float(np.ravel(x)[0]) for x in (stored, value)]
        return Line(name, *first, 0.0 if same else np.inf, 0.0)
    stored, value = np.ravel(stored), np.ravel(value)
    change = [np.inf if x is None else np.abs(np.ravel(x) - value) for x in disturbed]
    allowed = 3 * np.max([np.broadcast_to(x, value.shape) for x in change], 0) + 1e-12 * np.abs(value)
    off = np.abs(stored - value)
    worst = int(np.argmax(off / np.maximum(allowed, np.finfo(float).tiny)))
    size = abs(value[worst]) if abs(value[worst]) > allowed[worst] else 1.0  # zero up to rounding
    return Line(name, *(float(x) for x in (stored[worst], value[worst], off[worst] / size, allowed[worst] / size)))
