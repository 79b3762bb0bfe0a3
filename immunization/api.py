"""Immunization of a model in Python, and immunized models back from disk."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from immunization.config import build, compose
from immunization.data.images import ImagePair
from immunization.data.task import Split, Task, TaskPair
from immunization.errors import ConfigError, DataError
from immunization.evaluation.comparison import compare
from immunization.methods import Method, PairedBatches, train
from immunization.methods.linear_map import fit_head, probe_of_inputs
from immunization.models import Folded, Linear, Model, Timm
from immunization.models.folded import fold_into, folded_map, unfold
from immunization.models.linear import LinearMap
from immunization.models.weights import create
from immunization.runs import files
from immunization.runs.result import Result
from immunization.runs.resume import WEIGHTS
from immunization.training.loaders import LoaderBatches
from immunization.training.optimization import optimizer_of, scheduler_of

Loader = Iterable[tuple[Tensor, Tensor]]
"""Batches of images [n, C, H, W], preprocessed for the model, and labels [n] from 0 on."""


def immunize(
    model: nn.Module,
    primary_loader: Loader,
    harmful_loader: Loader,
    method: str = "learning_curve",
    *,
    trainable: str | Sequence[str] = "last",
    augmented: bool = False,
    scheduler: str = "none",
    seed: int = 0,
    **options: Any,
) -> nn.Module:
    """An immunized copy of a timm model, in eval mode; `model` stays as it is.

    `method` is any of conf/method. `closed_form` and `learning_curve` put a linear map behind the features and its
    inverse into the classifier, so that the outputs stay (the copy is in float64, since the inverse costs digits); the
    others train the modules named by `trainable` and the classifier, in the model's own dtype. `scheduler` is any of
    conf/scheduler. `options` are keys of the method (`epochs=100`), of the optimizer Adam as `optimizer__lr=1e-3`, or
    of the scheduler as `scheduler__eta_min=1e-5`.

    Both loaders are read once, and what enters the trained part is kept in memory; with `augmented=True` they are read
    in every epoch instead. Labels of `primary_loader` are outputs of the model. Raises ConfigError, DataError.
    """
    torch.manual_seed(seed)
    chosen = [f"method={method}", "tracker=none", "optimizer=adam", f"scheduler={scheduler}"]
    config = compose(chosen)
    for key, value in options.items():
        group, _, name = key.partition("__") if key.startswith(("optimizer__", "scheduler__")) else ("method", "", key)
        keys = config[group] or {}
        if name not in keys:
            known = ", ".join(str(k) for k in keys if not str(k).startswith("_"))
            raise ConfigError(f"immunize: {method} has no option {key!r}; there are {known or 'none'}")
        OmegaConf.update(config, f"{group}.{name}", value)
    if "precondition" in config.method and "precondition" not in options:
        config.method.precondition = "none"
    solver: Method = build(config, "method")
    if solver.batch_size is None and not solver.folds:
        solver.batch_size = 64
    weight = next(model.parameters())
    images = ImagePair("loaders", {}, cache=None).to(weight.device, weight.dtype)
    base = Timm.of(copy.deepcopy(model), images, trainable="fold" if solver.folds else trainable)
    loaders = {"primary": primary_loader, "harmful": harmful_loader}
    tasks = {role: _collect(base, role, loader, solver.folds) for role, loader in loaders.items()}
    pair = TaskPair("loaders", **tasks)
    if solver.folds:
        pair = pair.to(weight.device, torch.float64)
    trained: Model = Folded(base, pair) if solver.folds else base
    solver.setup(trained, pair)
    generator = torch.Generator().manual_seed(seed)
    batches: Any = PairedBatches(pair, solver.batch_size, generator)
    if augmented and not solver.folds:
        batches = LoaderBatches(loaders, lambda _, x, y: (base.trunk(x), y.to(weight.device)), pair.dim)
    optimizer = optimizer_of(config, trained.groups())
    steps = solver.epochs * batches.steps_per_epoch if config.scheduler else 0
    train(solver, trained, batches, optimizer, scheduler=scheduler_of(config, optimizer, steps))
    solver.finish(trained)
    return restore(copy.deepcopy(model), trained.export(), json.loads(trained.metadata()["immunization"]))


def audit(
    model: nn.Module,
    primary_loader: Loader,
    harmful_loader: Loader,
    reference: nn.Module | None = None,
    *,
    attacks: Sequence[str] | None = None,
    seed: int = 0,
    **options: Any,
) -> Result:
    """Attack a model with harmful data: how much does its immunization hold?

    `model` is a timm model, compared with `reference`, the same before it was immunized (None: the model without the
    map that `immunize` folded in), or what `load` gives for a linear map, which is compared with its inputs; its
    loaders give rows [n, D]. `attacks` are names of conf/attack (None: those of experiment=audit), `options` their keys
    as `adam__steps=100`. Of each loader, which is read once into memory, a fifth of the rows is for test and a fifth
    for validation. Returns the measures of experiment=audit; `result.verdict` says them in words.

    Raises ConfigError, DataError.
    """
    from immunization.runner import attack, evaluate  # which loads what none of the others needs

    torch.manual_seed(seed)
    chosen = [] if attacks is None else [f"attack=[{','.join(attacks)}]"]
    config = compose(["experiment=audit", "tracker=none", *chosen])
    for key, value in options.items():
        name, _, option = key.partition("__")
        if name not in config.attack or option not in config.attack[name]:
            raise ConfigError(f"audit: no option {key!r}; write <attack>__<key>, with {', '.join(config.attack)}")
        OmegaConf.update(config, f"attack.{name}.{option}", value)
    loaders = {"primary": primary_loader, "harmful": harmful_loader}
    audited: Model
    if isinstance(model, LinearMap):
        pair = TaskPair("loaders", **{role: _rows(role, loader) for role, loader in loaders.items()})
        audited = Linear(pair.to(model.theta.device, torch.float64))
        audited.extractor = copy.deepcopy(model).double()
        fit_head(audited, probe_of_inputs(pair.primary))
    else:
        like = next(model.parameters())
        audited, before = (_images(net, like) for net in (model, _before(model) if reference is None else reference))
        audited.compare_with(before)
        tasks = {role: _collect(audited, role, loader, False, test=True) for role, loader in loaders.items()}
        pair, audited.reference, audited.original_head = (
            TaskPair("loaders", **tasks),
            before.reference,
            before.original_head,
        )
    comparison = compare(pair, audited)
    measures = evaluate(config, comparison)
    measures.merge(attack(config, audited, comparison, audited.extractor.state_dict()))
    found = {key: getattr(measures, key) for key in ("metrics", "reasons", "curves", "flags")}
    return Result(seed, "loaders", audited.name, "unmodified", "completed", **found)


def _before(model: nn.Module) -> nn.Module:
    """The model without its folded map."""
    if folded_map(model) is None:
        raise ConfigError("audit: give the model as it was before immunization, audit(..., reference=model)")
    stripped = copy.deepcopy(model)
    unfold(stripped)
    return stripped


def _images(model: nn.Module, like: Tensor) -> Timm:
    """A copy of a timm model that reads images from a loader, in the dtype of `like`."""
    images = ImagePair("loaders", {}, cache=None).to(like.device, like.dtype)
    return Timm.of(copy.deepcopy(model).to(like), images)


def _rows(role: str, loader: Loader) -> Task:
    """The task of a loader of rows [n, D] and labels."""
    batches = [(torch.as_tensor(x).double(), torch.as_tensor(y)) for x, y, *_ in loader]
    if not batches:
        raise DataError(f"{role}_loader gives no batches")
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    classes = 0 if y.is_floating_point() else len(y.unique())
    y = y.double() if not classes else y.unique(return_inverse=True)[1]
    return Task(
        role, **{split: Split(x[rows], y[rows]) for split, rows in _parts(len(y), 5, 5).items()}, classes=classes
    )


def _parts(count: int, val: int, test: int | None) -> dict[str, Tensor]:
    """Rows of each split, in random order: each `val`-th for validation, each `test`-th for test (None: none)."""
    place, order = torch.arange(count), torch.randperm(count, generator=torch.Generator().manual_seed(0))
    held_out = place % val == val - 1
    tested = torch.zeros_like(held_out) if test is None else (place % test == 0)
    return {"train": order[~held_out & ~tested], "val": order[held_out], "test": order[tested]}


@torch.no_grad()
def _collect(base: Timm, role: str, loader: Loader, folded: bool, test: bool = False) -> Task:
    """One pass over a loader: the task as the trained part reads it, in random order.

    A tenth of the rows is for validation; with `test`, a fifth, and another fifth for test.
    """
    inputs, labels, features = [], [], []
    (before,) = base.before or (base,)
    for images, targets, *_ in loader:
        x = base.trunk(images)
        inputs.append(base.extractor(x).cpu() if folded else x.cpu())
        labels.append(torch.as_tensor(targets))
        if not folded:
            features.append(before.extractor(before.trunk(images)))
    if not labels:
        raise DataError(f"{role}_loader gives no batches")
    x, y = torch.cat(inputs), torch.cat(labels).long().to(base.head.weight.device)
    outputs = base.head.out_features
    if role == "primary" and not 0 <= int(y.min()) <= int(y.max()) < max(outputs, 2):
        raise ConfigError(
            f"immunize: labels of primary_loader go from {int(y.min())} to {int(y.max())}, the model has {outputs} "
            "outputs"
        )
    present, y = y.unique(return_inverse=True)
    if len(present) < 2:
        raise DataError(f"immunize: {role}_loader holds one class alone; at least two are needed")
    parts = _parts(len(y), 5, 5) if test else _parts(len(y), 10, None)
    splits = {s: Split(x[rows], y[rows.to(y.device)]) for s, rows in parts.items()}
    own = role == "primary" and len(present) < outputs
    width = None if folded else base.head.in_features
    for split, rows in parts.items() if features else ():
        before.reference[role, split] = torch.cat(features)[rows.to(base.head.weight.device)]
    eps = torch.finfo(base.dtype).eps
    return Task(role, **splits, classes=len(present), eps=eps, width=width, head=present if own else None)


def load(path: str | Path) -> nn.Module:
    """The immunized model of a run folder (or of its immunized.safetensors), in eval mode.

    A timm model for deep nets: `forward_features`, `forward_head(..., pre_logits=True)` (the immunized features) and
    the classifier work as ever. For linear models the map theta, which takes prepared inputs [N, D_in] to features.
    Raises DataError for a file that is not there, was not written by this project, or was altered since.
    """
    path = Path(path)
    path = path / WEIGHTS if path.is_dir() else path
    try:
        tensors, metadata = files.read_tensors(path)
    except DataError as error:
        raise DataError(f"{error}; give a run folder that holds a sound {WEIGHTS}") from error
    facts = metadata.get("immunization")
    if facts is None:
        if "theta" not in tensors:
            raise DataError(f"{path} holds neither a linear map nor a net of this project")
        return LinearMap(tensors["theta"], tensors.get("bias")).eval()
    known = json.loads(facts)
    return restore(create(known["architecture"], None, False, known["arguments"]), tensors, known)


def restore(net: nn.Module, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> nn.Module:
    """Put exported `tensors` into `net`, a timm model of the same architecture, and fold the map in if there is one."""
    net = net.to(getattr(torch, facts["dtype"]))
    if "fold" in facts:
        weight = next(net.parameters())
        size = tensors[f"{facts['fold']}.immunization.weight"].shape[0]
        fold_into(net, facts["fold"], size, dtype=weight.dtype, device=weight.device)
    net.load_state_dict(dict(tensors))
    return net.eval().requires_grad_(True)
