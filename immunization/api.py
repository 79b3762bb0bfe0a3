"""Immunization and audits of models in Python."""

import copy
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.export import ExportedProgram

from immunization.checks import Seed, check_value
from immunization.compute import machine, randomness
from immunization.compute.machine import onto
from immunization.config import compose
from immunization.data.images import WHOLE, ImagePair, ImageTask
from immunization.data.loaders import LabeledBatches, Loader, Loaders, rows_of_loader
from immunization.data.preparation import finish, standardize_targets
from immunization.data.task import TaskPair
from immunization.errors import ConfigError, DegenerateSpectrum
from immunization.evaluation import Comparison, LearningCurves, evaluate
from immunization.evaluation.convergence import faster
from immunization.evaluation.own_head import head_at_chance
from immunization.evaluation.validity import doubts_of, few_rows
from immunization.experiment import Experiment, resolve
from immunization.methods import Unmodified
from immunization.models import Linear, Model, Timm
from immunization.models.activations import take
from immunization.models.adapted import Adapted, adapted, check_net, logits_of, released
from immunization.models.deployed import deployed, kind_of
from immunization.models.fold import LinearMap, folded_map, recorded, unfold
from immunization.models.libraries import is_pretrained, save_config, save_pretrained
from immunization.models.named import Named
from immunization.models.weights import TOLERANCE, exported, facts_of, load, restore, rounding_flag
from immunization.results import model_card
from immunization.runner import attacked
from immunization.runs import files
from immunization.runs.filenames import CONFIG_OF_NET, OF_HUB, WEIGHTS
from immunization.runs.result import Result
from immunization.terminal import doing, reporting, waiting
from immunization.training.assembly import assemble
from immunization.training.session import TrainingSession
from immunization.usage import explaining

__all__ = ["audit", "immunize", "load", "save"]


@reporting
@explaining()
@machine.full_precision()
@randomness.isolated_rng()
@torch.enable_grad()
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
    verbose: bool | None = None,
    **options: Any,
) -> nn.Module:
    """An immunized copy of a classifier, in eval mode and of the same class and dtype; `model` stays as it is.

    `model` is one of timm, or any other module whose output is that of a linear layer inside of it. `method` is any of
    conf/method. `closed_form`, `learning_curve` and `decoys` put a linear map behind the features, its inverse into the
    classifier, so that the outputs stay. Both are computed in float64 and rounded once. The other methods train the
    modules named by `trainable` and the classifier, in the model's own dtype, but at least float32. `scheduler` is any
    of conf/scheduler. `options` are keys of the method (`epochs=100`), of the optimizer Adam as `optimizer__lr=1e-3`,
    or of the scheduler as `scheduler__eta_min=1e-5`; defaults are those of folders of images (conf/hparams).

    Bars show the progress on a terminal and in a notebook; elsewhere `verbose=True` gives a line a minute on stderr.
    `verbose=False` shows nothing.

    Both loaders are read once, and the inputs of the trained part are kept in memory; with `augmented=True` training
    reads them anew in every epoch, in their batches. Labels of `primary_loader` are indices of the model's outputs.

    Gives a UserWarning if the outputs change by more than a thousandth of the largest; if harm became easier, which
    means that a fresh linear probe on the harmful training rows reaches 90 % of the original model's best in less than
    0.8 of its steps (`audit` measures it on held-out rows); and if the classifier of `model` is at chance on the
    primary training rows, so that there is nothing to keep. Raises ConfigError, also where a folded map would not keep
    the outputs, as behind a classifier whose weight is computed from others, and DataError.
    """
    check_value("seed", seed, Seed)
    check_value("verbose", verbose, bool | None)
    check_value("trainable", trainable, str | Sequence[str])
    if not trainable:
        raise ConfigError(
            "immunize: trainable is empty; name modules of the model, such as layer4, or give trainable='last'"
        )
    torch.manual_seed(seed)
    experiment = _configured(method, scheduler, options)
    solver = experiment.method()
    for role, loader in (("primary", primary_loader), ("harmful", harmful_loader)):
        if loader is None:
            raise ConfigError(f"immunize: {role}_loader is None; give a loader for each of the two tasks")
    if augmented and not solver.folds and (solver.patience is not None or solver.max_accuracy_drop is not None):
        raise ConfigError(
            "immunize: augmented=True trains on all images, but patience and max_accuracy_drop need images that "
            "training does not see; leave out one of these options"
        )
    loaders = _loaders(model, primary_loader, harmful_loader, val=10, test=None)
    net, inputs = _copy(model, loaders), loaders["primary"].first()
    if folded_map(net) is not None:
        raise ConfigError("immunize: the model already has a folded map; give the model as it was before immunization")
    outputs, layers = _outputs(net, inputs), "fold" if solver.folds else trainable
    if bad := int(outputs.isnan().any(1).sum()):
        raise ConfigError(
            f"immunize: the outputs of the model are NaN for {bad} of the first {len(outputs)} inputs of "
            "primary_loader; check its weights and these inputs"
        )
    data, like = _source(net, loaders, augmented and not solver.folds)
    parts = assemble(
        solver,
        partial(Timm, trainable=layers, net=copy.deepcopy(net)),
        data,
        like.device,
        like.dtype,
        attacked=False,
    )
    trained, pair = parts.model, parts.trained_on
    if not solver.folds:
        _check_graph(trained, pair, trainable)
    single = [loader.name for loader in loaders.values() if loader.smallest < 2]
    if single and data.augment:
        raise ConfigError(f"immunize: {single[0]} gives a batch of one row, which has no spectrum: set drop_last=True")
    if "batch_size" not in options and not solver.folds:
        solver.batch_size = min(solver.batch_size or 64, *(len(task.train) for task in pair.shown.values()))
    primary = pair.primary
    untrained = head_at_chance(primary.measure(trained.logits(primary.train.x), primary.train.y).item(), primary.chance)
    session = TrainingSession(parts, experiment.optimizer, experiment.scheduler, seed)
    with doing(session.where):
        session.fit()
    tensors, facts = exported(trained, pair.primary)
    doubts = [reason for reason in (_easier(trained, pair), untrained) if reason]
    few = [
        f"the {role} task has {few_rows(len(task.train), width)}; give more rows"
        for role, task in pair.shown.items()
        if solver.folds and len(task.train) < (width := trained.head.in_features)
    ]
    for reason in filter(None, (*doubts, *few, rounding_flag(facts))):
        warnings.warn(f"immunize: {reason}", stacklevel=7)  # that of the caller, above five decorators
    immunized = restore(released(net), tensors, facts)
    if solver.folds:
        _check_outputs(outputs, _outputs(_named(immunized, loaders), inputs), facts["rounding"])
    wanted = {name: p.requires_grad for name, p in model.named_parameters()}
    for name, p in immunized.named_parameters():
        p.requires_grad_(wanted.get(name.replace(".original.", "."), wanted.get(name, True)))
    made = model_card.recipe(method, experiment.settings["method"], seed)
    immunized.immunized_by = made | {"rounding": facts.get("rounding"), "doubts": doubts}
    return immunized


def save(model: nn.Module, folder: str | Path, result: Result | None = None, **arguments: Any) -> Path:
    """Write a net of `immunize` as immunized.safetensors, config.json and model_card.md, and return the folder.

    `load` reads the folder; where the net is none of timm, torchvision or transformers, load(folder, net). A classifier
    of transformers without a folded map is written as model.safetensors, for its from_pretrained; the card says which.
    The measures of `result`, which `audit` returns, go into it. `arguments` are those of timm.create_model that timm
    itself does not remember of the net. Raises ConfigError for a net that could not be loaded again.
    """
    check_net("save: the model", model)
    facts, folder = facts_of(model, arguments), Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ConfigError(f"save: {folder} is a file; give a folder") from None
    for name in (WEIGHTS, OF_HUB[0]):
        (folder / name).unlink(missing_ok=True)  # what was saved here before
    if is_pretrained(facts):
        path = save_pretrained(model, folder, facts)
    else:
        files.write_weights(path := folder / WEIGHTS, model.state_dict(), facts)
        if facts.get("library") == "transformers":
            save_config(model, folder)
        else:
            files.write(folder / CONFIG_OF_NET, json.dumps(facts, indent=2) + "\n")
    model_card.write(folder, facts, facts["immunized_by"], result, path.name)
    return folder


@reporting
@explaining()
@machine.full_precision()
@randomness.isolated_rng()
@torch.enable_grad()
def audit(
    model: nn.Module | ExportedProgram | str | Path,
    primary_loader: Loaders | None = None,
    harmful_loader: Loaders | None = None,
    reference: nn.Module | ExportedProgram | str | Path | None = None,
    *,
    attacks: str | Sequence[str] | None = None,
    budget: Literal["quick", "standard", "nightly"] | None = None,
    features: str | None = None,
    seed: int = 0,
    verbose: bool | None = None,
    **options: Any,
) -> Result:
    """Attack a model with harmful data: what is it worth to an attacker, and how much of that is removed?

        immunization.audit(model, harmful_loader=loader, reference=model_before, budget="standard").verdict

    With the harmful task's loader alone only attacks are measured, with both the measures of experiment=audit, too.
    Each is a loader, of which a fifth of the rows is for test and a fifth for validation, or a dict of loaders for
    `train`, `test` and, if there are such rows, `val`. They are read once into memory.

    `model` is a classifier as for `immunize`. It is compared with `reference`, the classifier before immunization
    (None: without the map that `immunize` folded in). Either may be what was deployed, which is only run: a quantized
    net, TorchScript, an exported program, or the path of an ONNX file, with `features` the name of a tensor (None: what
    the last layer reads). Or `model` is what `load` returns for a linear map, which is compared with its inputs; its
    loaders give rows [n, D]. `budget` is a numbered suite of attackers, which also says what the model is worth and how
    much of that is removed (docs/attacks.md). Alternatively `attacks` names one or several of conf/attack (None: those
    of experiment=audit). `options` are keys of attacks, as `adam__steps=100`. `verdict` of the result has sentences.
    `verbose` is as for `immunize`. Raises ConfigError, DataError.
    """
    check_value("seed", seed, Seed)
    check_value("verbose", verbose, bool | None)
    torch.manual_seed(seed)
    check_value("attacks", attacks, str | Sequence[str] | None)
    check_value("budget", budget, Literal["quick", "standard", "nightly"] | None)
    if budget and attacks:
        raise ConfigError("audit: budget and attacks are both given; give one of them")
    if harmful_loader is None:
        raise ConfigError(
            "audit: harmful_loader is missing; an audit needs data of the harmful task, audit(model, "
            "harmful_loader=loader, ...)"
        )
    attacks = budget or attacks
    attacks = [attacks] if isinstance(attacks, str) else attacks
    overrides = [] if attacks is None else [f"attack=[{','.join(attacks)}]"]
    config = compose(["experiment=audit", "tracker=none", *overrides])
    for key, value in options.items():
        name, _, option = key.partition("__")
        if name not in config.attack or option not in config.attack[name]:
            raise ConfigError(
                f"audit: there is no option {key!r}; write <attack>__<key> with one of the attackers "
                f"{', '.join(config.attack)}"
            )
        _set(config, f"attack.{name}.{option}", value)
    experiment = resolve(config)
    make: Callable[..., Model]
    data: TaskPair | ImagePair
    if isinstance(model, LinearMap):
        harmful = rows_of_loader("harmful", harmful_loader)
        primary = harmful if primary_loader is None else rows_of_loader("primary", primary_loader)
        data = finish(standardize_targets(TaskPair("loaders", primary, harmful)), common_range=False)
        if data.dim != len(model.theta):
            raise ConfigError(f"audit: the map reads rows of {len(model.theta)} columns, the loaders give {data.dim}")
        like, make = model.theta.double(), partial(_linear, model)
    else:
        loaders = _loaders(model, primary_loader, harmful_loader)
        net = _audited(model, loaders, features)
        before = _before(net) if reference is None else _audited(reference, loaders, features)
        data, like = _source(net, loaders, before=before)
        if folded_map(net) is not None:
            like = like.double()  # what the map spreads over many orders of magnitude is measured as it is
        make = partial(_compared, net, before)
    parts = assemble(Unmodified(), make, data, like.device, like.dtype)
    comparison = Comparison(parts.pair, parts.model)
    if isinstance(model, LinearMap):  # which comes without a head
        parts.model.set_head(comparison.probe("primary", "immunized").optimum().T)
    with waiting("measuring"):
        alone = primary_loader is None
        measures = doubts_of(comparison, ["harmful"]) if alone else evaluate(experiment.evaluation, comparison)
    measures.merge(attacked(experiment, comparison, parts.start))
    result = Result(seed, "loaders", parts.model.name, "unmodified", "completed")
    result.take(measures)
    return result


def _linear(theta: LinearMap, pair: TaskPair) -> Model:
    """A map as a model, still without a primary head."""
    made = Linear(pair)
    made.extractor = copy.deepcopy(theta).double()
    return made


def _compared(net: nn.Module, before: nn.Module, pair: ImagePair) -> Model:
    """A net as a model that is compared with another one."""
    made = Timm(pair, net=net)
    made.compare_with(Timm(pair, net=before))
    return made


def _configured(method: str, scheduler: str, options: dict[str, Any]) -> Experiment:
    """The experiment of a method with options as `immunize` takes them."""
    check_value("method", method, str)
    chosen = ["kind@_global_=image_folders", f"method={method}", "optimizer=adam", f"scheduler={scheduler}"]
    config = compose([*chosen, "tracker=none"])
    for key, value in options.items():
        group, _, name = key.partition("__") if key.startswith(("optimizer__", "scheduler__")) else ("method", "", key)
        keys = config[group] or {}
        if name not in keys:
            known = ", ".join(str(k) for k in keys if not str(k).startswith("_"))
            own = [f"{other}__{key}" for other in ("optimizer", "scheduler") if key in (config[other] or {})]
            meant = f"; did you mean {' or '.join(own)}" if own else ""
            raise ConfigError(f"immunize: {method} has no option {key!r}{meant}; there are {known or 'none'}")
        _set(config, f"{group}.{name}", value)
    if "precondition" in config.method and "precondition" not in options:
        config.method.precondition = "none"
    return resolve(config)


def _set(config: DictConfig, key: str, value: Any) -> None:
    """Give a key a value from Python, where a list may be a tuple."""
    OmegaConf.update(config, key, list(value) if isinstance(value, tuple) else value)


def _easier(model: Model, pair: TaskPair) -> str | None:
    """Why an immunized model makes harm easier, as far as the training rows show it."""
    with suppress(DegenerateSpectrum):  # features that no probe can learn from
        measures = LearningCurves().on_training_rows(Comparison(pair, model), "harmful")
        return (reason := faster(measures, ["harmful"])) and f"on the training rows, {reason}"
    return None


def _loaders(
    model: object, primary: Loaders | None, harmful: Loaders, **held_out: int | None
) -> dict[str, LabeledBatches]:
    if primary is harmful:
        raise ConfigError("primary_loader and harmful_loader are the same; give each task its own data")
    given = {"primary": primary, "harmful": harmful}
    for role, parts in given.items():
        if isinstance(parts, Mapping) and len({id(part) for part in parts.values()}) < len(parts):
            raise ConfigError(f"{role}_loader: {', '.join(parts)} are the same loader; give each split its own rows")
    held_out["pad"] = getattr(getattr(model, "config", None), "pad_token_id", None) or 0
    checked = {role: LabeledBatches(role, loader, **held_out) for role, loader in given.items() if loader is not None}
    for loader in checked.values():
        loader.first()  # or DataError for one that gives nothing
    if len({loader.fields for loader in checked.values()}) > 1:
        told = "; ".join(f"{loader.name}: {', '.join(loader.fields) or 'one tensor'}" for loader in checked.values())
        raise ConfigError(
            f"the loaders give different fields ({told}); give those that the model reads, in all of them"
        )
    for loader in checked.values():
        loader.widen(max(other.length for other in checked.values()))
    return checked


def _source(
    net: nn.Module, loaders: Mapping[str, LabeledBatches], augment: bool = False, before: nn.Module | None = None
) -> tuple[ImagePair, Tensor]:
    """The tasks of loaders for a net, and a tensor of the dtype and on the device in which it computes.

    That is float32 at least: rounding to 16 bits would decide the rank of features.
    """
    tasks = {role: ImageTask(role, (), {WHOLE: loader}) for role, loader in loaders.items()}
    weights, shape = next(net.parameters()), next(iter(loaders.values())).first().shape
    square = (
        len(shape) == 4 and shape[2] == shape[3] and not all(isinstance(one, Adapted) for one in (net, before or net))
    )
    like = weights.float() if weights.dtype.itemsize < 4 else weights
    return ImagePair("loaders", tasks, cache=None, augment=augment, size=shape[3] if square else None), like


def _audited(model: Any, loaders: dict[str, LabeledBatches], features: str | None) -> nn.Module:
    """What `_copy` gives; also of a net that was compiled, and of one that can only be run."""
    model, read = getattr(model, "_orig_mod", model), next(iter(loaders.values()))
    if kind_of(model) is None:
        return _copy(model, loaders)
    return adapted(_named(deployed(model, read.first(), read.fields, features), loaders), read.first())


def _copy(model: nn.Module, loaders: dict[str, LabeledBatches]) -> nn.Module:
    """A copy of a model in timm's form. Raises ConfigError for what is no model with a linear classifier."""
    check_net("the model", model)
    try:
        model = copy.deepcopy(model)
    except RuntimeError as error:  # of tensors with a graph, as weight_norm and pruning leave them
        raise ConfigError(
            f"the model cannot be copied ({' '.join(str(error).split())[:120]}): make its weights plain parameters, "
            "by torch.nn.utils.remove_weight_norm or torch.nn.utils.prune.remove"
        ) from error
    return adapted(_named(model, loaders), next(iter(loaders.values())).first())


def _named(net: nn.Module, loaders: Mapping[str, LabeledBatches]) -> nn.Module:
    """The net as one that reads what the loaders give: of texts, the fields in one tensor."""
    fields = next(iter(loaders.values())).fields
    return Named(net, fields) if fields else net


def _check_graph(model: Model, pair: TaskPair, trainable: str | Sequence[str]) -> None:
    """Raise ConfigError where features have no gradients, as behind a torch.no_grad() in the forward."""
    x = onto(take(pair.harmful.train.x, torch.arange(2)), model.head.weight)
    trained = {*model.trained().values()}
    owners = [
        (name, part) for name, part in model.extractor.named_modules() if trained & {*part.parameters(recurse=False)}
    ]
    with recorded(owners) as ran:
        features = model.training_features(x)
    if trained and not features.requires_grad:
        if not ran:
            raise ConfigError(
                f"immunize: trainable={trainable}: what is trained never runs in the forward of {model.name}; name "
                "modules that do"
            )
        raise ConfigError(
            f"immunize: features of {model.name} have no gradients; remove torch.no_grad() from its forward, or "
            "use method=closed_form, learning_curve or decoys"
        )


@torch.no_grad()
def _outputs(net: nn.Module, inputs: Tensor) -> Tensor:
    return logits_of(net.eval()(onto(inputs.clone(), next(net.parameters()))))


def _check_outputs(before: Tensor, after: Tensor, rounding: float) -> None:
    """Raise ConfigError where a folded map changes the outputs by more than rounding may."""
    change, largest = (after - before).abs().max().item(), before.abs().max().item()
    if not change <= (TOLERANCE + 10 * rounding + 100 * torch.finfo(before.dtype).eps) * largest:  # or NaN
        raise ConfigError(
            f"immunize: with the map, outputs change by {change:.2g}, the largest being {largest:.2g}: the classifier "
            "must be a plain nn.Linear, whose weight is a parameter that no other layer shares, without "
            "parametrization, mask or hooks"
        )


def _before(net: nn.Module) -> nn.Module:
    """A net in timm's form without its folded map."""
    if folded_map(net) is None:
        raise ConfigError("audit: give the model as it was before immunization, audit(..., reference=model)")
    stripped = copy.deepcopy(net).double()
    unfold(stripped)
    return stripped
