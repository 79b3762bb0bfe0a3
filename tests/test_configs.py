"""The YAML groups: every option and experiment composes, its keys are its constructor's, mistakes are refused."""

import copy
import functools
import inspect
import math
import re
import shutil
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from helpers.options import OPTIONS, SETUPS, nodes
from helpers.repository import ROOT
from hydra.errors import HydraException
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from immunization import run
from immunization.attacks import FineTune, LoRA
from immunization.checks import CONF, Component, read_yaml, takes
from immunization.config import build, compose, factory, hparams, slug
from immunization.data.image_folders import open_task, open_unlabeled
from immunization.data.tables import dialect_of
from immunization.data.text import open_kept, open_text
from immunization.errors import ConfigError, DataError
from immunization.experiment import resolve
from immunization.methods import Method
from immunization.runs import tracker

pytestmark = pytest.mark.trains

EXPERIMENTS = sorted(
    path.relative_to(CONF / "experiment").with_suffix("").as_posix() for path in (CONF / "experiment").rglob("*.yaml")
)
LINEAR = (  # one of each kind: the others choose among the same data, starts, methods, measures and attacks
    "alignment",
    "audit",
    "leaderboard/linear_houses",
    "mnist",
    "paper/figure1",
    "paper/mnist",
    "paper/table1_closest",
    "paper/table2_closest",
)
KINDS = sorted(path.stem for path in CONF.glob("hparams/*.yaml"))
GIVEN = {
    "model": {"pair", "net"},
    "optimizer": {"params"},
    "scheduler": {"optimizer"},
}  # arguments that are objects, which no YAML can hold


@pytest.fixture
def config() -> DictConfig:
    """A fresh copy of what `python launch.py tracker=none` runs."""
    return copy.deepcopy(composed())


@functools.cache
def composed() -> DictConfig:
    return compose(["tracker=none"])


def change(cfg: DictConfig, override: str) -> None:
    """What `key=value`, or `+key=value`, does on the command line."""
    key, value = override.lstrip("+").split("=")
    OmegaConf.update(cfg, key, OmegaConf.from_dotlist([f"x={value}"]).x, force_add=True)


# --- Composition ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_composes_and_its_keys_are_its_constructors(group, option):
    node = nodes()[group, option]
    if node is None:
        assert (group, option) in {("tracker", "none"), ("scheduler", "none"), ("scheduler", "default")}
        return
    target = get_object(node._target_)
    keys = {str(key) for key in node if not str(key).startswith("_")}
    assert all(takes(target, key) for key in keys)
    if isinstance(target, type) and issubclass(target, Component):
        assert keys <= target().options.keys()
    elif node._target_.startswith("immunization."):  # torch's classes have more than are worth a line
        assert keys == {*inspect.signature(target).parameters} - GIVEN.get(group, set())


def unexplained(path: Path) -> list[str]:
    """Lines of a file that do not say what they mean; the whole of one that must say above what it is."""
    lines = path.read_text().splitlines()
    setup = bool(set(path.relative_to(CONF).parts) & {*SETUPS, "config.yaml"} - {"launcher", "sweeper"})
    chosen = any(re.match(r"defaults:(?! \[override)", line) for line in lines)
    if setup or (chosen and "\n_target_:" not in path.read_text()):
        return [] if any(line.startswith("# ") and not line.startswith("# @") for line in lines) else lines
    knobs = [line for line in lines if re.match(r" *(?!defaults|tracker|scheduler)[a-zA-Z]\w*: *\S", line)]
    return [line for line in knobs if "#" not in line]


def test_every_knob_has_its_meaning_beside_it():
    """Options say behind each key what it means; what changes keys described elsewhere says above what it is."""
    assert {path: lines for path in CONF.rglob("*.yaml") if (lines := unexplained(path))} == {}


@pytest.mark.parametrize("kind", KINDS)
def test_hyper_parameters_change_values_and_add_no_key(kind):
    model = "timm" if kind == "resnet18_cars128" else "linear"
    keys = {
        "optimizer": {key for path in CONF.glob("optimizer/*.yaml") for key in OmegaConf.load(path)},
        "model": set(OmegaConf.load(CONF / "model" / f"{model}.yaml")),
    }
    for method, section in hparams(kind).items():
        keys["method"] = set(nodes()["method", method])
        for group, values in section.items():
            if group == "scheduler":
                assert values is None or (CONF / "scheduler" / f"{values}.yaml").is_file()
            elif group not in ("defaults", "scheduler_source", "source"):
                assert set(values) <= keys[group]
        assert not section or section["source"]
        assert ("scheduler" in section) == ("scheduler_source" in section)


def test_hyper_parameters_are_chosen_by_kind_of_data_and_method():
    chosen = hparams("large_linear")["imma"]
    cfg = compose(["dataset=mnist", "method=imma"])
    assert (cfg.optimizer.lr, cfg.method.epochs) == (chosen["optimizer"]["lr"], chosen["method"]["epochs"])
    assert cfg == compose(["dataset=mnist", "method=imma", "kind@_global_=large_linear"])
    assert compose(["dataset=mnist", "method=imma", "kind@_global_=linear"]).method.epochs == 300


def test_a_kind_says_what_differs_from_one_that_it_is_like():
    net, small, cifar = (hparams(kind)["condition_number"] for kind in ("net", "small_net", "cifar10"))
    assert small == net
    assert cifar["method"] == net["method"] | {"epochs": 10}
    assert hparams("cifar10")["forget"]["method"] == hparams("small_net")["forget"]["method"]
    assert (hparams("cifar10")["forget"]["scheduler"], hparams("small_net")["forget"]["scheduler"]) == (
        None,
        "warmup_cosine",
    )
    assert hparams("paper_table1")["learning_curve"] == {}


def test_a_data_set_of_ones_own_names_its_kind_and_its_exceptions(tmp_path):
    files = {
        "dataset/mine": (CONF / "dataset" / "digits.yaml").read_text().replace(": digits", ": mine", 1),
        "kind/mine": "",
        "hparams/scheduler/mine/learning_curve": "defaults: [/hparams/scheduler/linear/learning_curve]\n",
        "hparams/mine/learning_curve": "defaults: [/hparams/linear/learning_curve]\nmethod: {epochs: 7}\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text(text)
    places = [f"hydra.searchpath=[file://{tmp_path}]", "dataset=mine"]
    cfg = compose([*places, "method=learning_curve"])
    assert (cfg.method.epochs, cfg.method.targets, cfg.optimizer.lr) == (7, "baseline", 1e-3)
    assert cfg.scheduler._target_.endswith(".CosineAnnealingLR")
    assert compose([*places, "method=learning_curve", "method.epochs=8"]).method.epochs == 8
    (tmp_path / "dataset" / "mine.yaml").write_text(files["dataset/mine"].replace(": mine", ": liner", 1))
    with pytest.raises(HydraException, match="Could not find 'kind/liner'"):
        compose(places)


@pytest.mark.parametrize("path", sorted(CONF.glob("experiment/[pr][ae]*/*.yaml")), ids=lambda path: path.stem)
def test_the_papers_experiments_take_its_own_regularizer_at_its_own_rate(path):
    cfg = compose([f"experiment={path.relative_to(CONF / 'experiment').with_suffix('')}", "method=condition_number"])
    assert cfg.scheduler is None
    assert cfg.method.power == math.inf


@pytest.mark.parametrize("path", sorted(CONF.glob("experiment/paper/*.yaml")), ids=lambda path: path.stem)
def test_the_papers_experiments_take_its_rivals(path):
    factory(compose([f"experiment=paper/{path.stem}", "method=imma"]), "method")


def test_the_command_line_wins_over_an_experiment_and_that_over_the_hyper_parameters():
    assert compose(["dataset=mnist", "method=imma", "method.epochs=7"]).method.epochs == 7
    cfg = compose(["experiment=paper/house_prices"])
    assert (cfg.method.epochs, cfg.method.lambda_H, cfg.dataset.protocol) == (1000, 1e7, "authors")
    cfg = compose(["experiment=paper/house_prices", "method.epochs=2", "method.lambda_H=3", "dataset.protocol=full"])
    assert (cfg.method.epochs, cfg.method.lambda_H, cfg.dataset.protocol) == (2, 3, "full")


def test_defaults():
    cfg = compose()
    assert cfg.dataset.name == "digits"
    assert cfg.method._target_.endswith(".ConditionNumber")
    assert cfg.tracker._target_.endswith(".Wandb")
    assert (cfg.seed, cfg.device, cfg.dtype) == (0, "auto", "float64")
    assert {"rir", "definition", "primary", "ceiling", "norm_ratio", "learning_curves"} <= set(cfg.evaluation)
    resolve(cfg)


def test_composing_leaves_nothing_behind():
    before = compose(["seed=3", "dataset.primary=4"])
    assert compose().seed == 0
    assert (before.seed, before.dataset.primary) == (3, 4)


@pytest.mark.parametrize(
    "override",
    [
        "methd=imma",
        "method=imm",
        "method.lamda_P=1",
        "evaluation=[rri]",
        "experiment=hose_prices",
        "dataset.primry=2",
        "sed=1",
        "tracker=wnadb",
        "scheduler=consine",
        "debug=defualt",
    ],
)
def test_a_mistyped_group_option_or_key_is_refused(override):
    with pytest.raises(HydraException):
        compose([override])


# --- Experiments ------------------------------------------------------------------------------------------------------


def shrunk(name: str, data_dir: Path) -> list[str]:
    """Overrides that leave an experiment its kind and take away its size."""
    overrides = [f"experiment={name}", "tracker=none", "baselines=null"]
    cfg = compose(overrides)
    if "root" in cfg.dataset:
        overrides += [f"dataset.root={data_dir / cfg.dataset.name}", "dataset.download=false"]
    if "max_samples" in cfg.dataset:
        overrides.append("dataset.max_samples=70")
    if cfg.method.get("epochs"):
        overrides.append("method.epochs=1")
    if "norm_ratio" in cfg.evaluation:
        overrides.append("evaluation.norm_ratio.steps=10")
    overrides += [f"attack.{name}.steps=8" for name, node in (cfg.get("attack") or {}).items() if "steps" in node]
    return overrides


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes_and_says_in_one_line_which_data_are_absent(name, monkeypatch, tmp_path):
    """Those that sweep over methods leave the choice to the sweeper, and `resolve` to its jobs."""
    monkeypatch.delenv("IMMUNIZATION_DATA_ROOT", raising=False)
    monkeypatch.setenv("IMMUNIZATION_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)  # of the hub
    monkeypatch.delitem(sys.modules, "timm.data.readers.reader_hfds", raising=False)
    cfg = compose([f"experiment={name}"])
    if "sweeper" not in (CONF / "experiment" / f"{name}.yaml").read_text():
        resolve(cfg)
    assert slug(cfg.name) == cfg.name
    assert OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    if not {"root", "primary_root"} & cfg.dataset.keys():
        return  # it reads no files
    if "download" in cfg.dataset:
        cfg.dataset.download = False
    with pytest.raises((ConfigError, DataError)) as caught:
        build(cfg, "dataset")
    said = str(caught.value)
    given = cfg.dataset.get("root") or cfg.dataset.primary.get("source")
    place = given or tmp_path / "data" / Path(cfg.dataset.primary_root).name
    assert str(place) in said
    assert re.search(r"dataset\.(primary_)?root", said)
    assert re.search(r"docs/install\.md|dataset\.download=true", said)
    assert "\n" not in said


@pytest.mark.parametrize("name", LINEAR)
def test_every_linear_experiment_runs_on_shrunk_data(name, data_dir, tmp_path, no_figures):
    try:
        result = run(shrunk(name, data_dir), folder=tmp_path)
    except DataError as error:
        if "does not exist" not in str(error):
            raise
        pytest.skip(f"no data for it: {error}")
    assert result.status == "completed"
    assert result.metrics["rir"] > 0
    assert result.metrics["authors/rir"] > 0


def test_the_debug_group_makes_any_run_small(tmp_path, no_figures):
    result = run(["debug=default", "dataset.max_samples=20"], folder=tmp_path)
    assert tracker.history(tmp_path)["rir"]["x"] == [0, 1, 2]
    assert result.status == "completed"


# --- Rules across groups, and objects ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("device=tpu", "device must be one of auto, cpu, cuda, not 'tpu'"),
        ("dtype=float16", "dtype must be one of float64, float32, not 'float16'"),
        ("seed=-1", "seed must be an integer of at least 0"),
        ("seed=1.5", "seed must be an integer of at least 0"),
        ("seed=4294967296", "seed must be an integer of at least 0 and below 2^32, not 4294967296"),
        ("threads=0", "threads must be an integer of at least 1, or null"),
        ("log_every=0", "log_every must be an integer of at least 1, or null"),
        ("tags=text", "tags must be a list"),
        ("trusted=text", "trusted must be a list"),
        ("optimizer.lr=-1", "optimizer.lr must be a finite number above 0"),
        ("optimizer.lr=.nan", "optimizer.lr must be a finite number above 0"),
        ("optimizer.lr=fast", "optimizer.lr must be a finite number above 0"),
        ("model.bias=true", "method.precondition=cancelled needs model.bias=false"),
    ],
)
def test_rules_across_groups(config, override, message):
    change(config, override)
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve(config)


def test_a_net_needs_images(tmp_path):
    with pytest.raises(ConfigError, match=r"model=resnet18 needs images, .*; 'digits' has none"):
        run(["model=resnet18", "method=identity", "tracker=none"], folder=tmp_path)


def test_a_preconditioner_needs_a_linear_model():
    config = compose(["model=resnet18", "dataset=digits_deep", "method.precondition=cancelled"])
    with pytest.raises(ConfigError, match=r"method\.precondition=\w+ needs model=linear.*method\.precondition=none"):
        resolve(config)
    config.method.precondition = "none"
    resolve(config)


def test_fast_steps_of_nets_that_do_not_exist():
    with pytest.raises(ConfigError, match=r"model\.amp=bfloat16 needs dtype=float32"):
        resolve(compose(["model=resnet18", "dataset=digits_deep", "model.amp=bfloat16", "method=opt_kappa"]))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("method.epochs=1.5", "method.epochs must be an integer of at least 0, not 1.5"),
        ("method.epochs=true", "method.epochs must be an integer of at least 0, not True"),
        ("method.lambda_P=heavy", "method.lambda_P must be a finite number of at least 0, not 'heavy'"),
        ("method.lambda_P=-1", "method.lambda_P must be a finite number of at least 0, not -1"),
        ("method.batch_size=many", "method.batch_size must be an integer of at least 2, or null, not 'many'"),
        ("method.balance=1", "method.balance must be true or false, not 1"),
        ("method.precondition=inverse", "must be one of cancelled, ridge, pinv, none, not 'inverse'"),
        ("+method.lamda_P=1", "unexpected keyword argument 'lamda_P'"),
        ("method._target_=immunization.methods.Magic", "immunization.methods has no Magic"),
        ("method._target_=immunization.methods.ConditonNumber", "has no ConditonNumber; did you mean ConditionNumber"),
        ("method._target_=immunization.magic.Method", "magic"),
        (
            "method._target_=os.system",
            "not from a trusted package (immunization.methods); add yours with trusted=",
        ),
    ],
)
def test_values_a_constructor_cannot_take_are_named(config, override, message):
    change(config, override)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        build(config, "method")
    assert "method" in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [("suite=quick", "and not 'quick'; attack=[standard] brings its own"), ("checkpoint=5", "and not 5")],
)
def test_groups_of_options_are_no_values(override, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve(compose([override]))


def test_a_track_can_run_without_its_attackers():
    experiment = resolve(compose(["experiment=leaderboard/resnet18_cars", "method=identity", "attack=[]"]))
    assert (experiment.attack, experiment.suite, experiment.published) == ({}, None, None)


def test_an_integer_is_a_number_and_null_is_one_of_the_alternatives(config):
    change(config, "method.lambda_P=2")
    change(config, "method.batch_size=null")
    method = build(config, "method")
    assert (method.lambda_P, method.batch_size) == (2, None)


class Mine(Method):
    """A method of the user's own; its annotation exists for type checkers alone."""

    def __init__(self, value: "Unknown" = 1) -> None:  # noqa: F821
        self.value = value


def test_packages_of_the_user_are_built_once_trusted(config):
    config.method = {"_target_": f"{__name__}.Mine", "value": 3}
    with pytest.raises(ConfigError, match="not from a trusted package"):
        build(config, "method")
    config.trusted = [__name__.partition(".")[0]]
    assert build(config, "method").value == 3
    config.trusted = [__name__[:4]]  # a whole name, not its beginning
    with pytest.raises(ConfigError, match="not from a trusted package"):
        build(config, "method")


def test_a_partial_option_is_the_callable(config):
    change(config, "optimizer.lr=0.5")
    factory = build(config, "optimizer")
    assert factory([torch.zeros(1, requires_grad=True)]).defaults["lr"] == 0.5


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("a b/c", "a-b-c"),
        ("../../etc/passwd", "etc-passwd"),
        ("method=imma,seed=1", "method=imma,seed=1"),
        (".hidden", "hidden"),
        ("", "run"),
        ("///", "run"),
        (None, "None"),
        ("x" * 150, "x" * 150),
    ],
)
def test_slugs_are_safe_file_names(text, name):
    assert slug(text) == name


# --- Values of a machine's user ---------------------------------------------------------------------------------------


@pytest.fixture
def conf(tmp_path, monkeypatch) -> Path:
    """A copy of conf/ in the place of the shipped one."""
    copied = Path(shutil.copytree(CONF, tmp_path / "conf"))
    for module in ("checks", "config", "experiment"):
        monkeypatch.setattr(f"immunization.{module}.CONF", copied)
    return copied


def test_a_local_file_gives_places_and_accounts(conf, monkeypatch):
    monkeypatch.setenv("IMMUNIZATION_CACHE", "/elsewhere")
    shutil.copy(conf / "local.yaml.example", conf / "local.yaml")
    cfg = compose(["experiment=resnet18_cars_small", "tracker=wandb"])
    resolve(cfg)
    assert cfg.dataset.primary_root == "/data/immunization/imagenette224"
    assert (cfg.tracker.entity, cfg.dataset.cache) == ("my-team", "/scratch/cache/activations")
    assert compose(["cache=/mine", "dataset=mnist"]).dataset.root == "/mine/mnist"


def test_environment_variables_give_them_too(monkeypatch):
    for name in ("IMMUNIZATION_DATA_ROOT", "IMMUNIZATION_CACHE", "WANDB_ENTITY"):
        monkeypatch.setenv(name, f"/{name}")
    cfg = compose(["experiment=resnet18_cars_small", "tracker=wandb"])
    assert cfg.dataset.primary_root == "/IMMUNIZATION_DATA_ROOT/imagenette224"
    assert (cfg.tracker.entity, cfg.dataset.cache) == ("/WANDB_ENTITY", "/IMMUNIZATION_CACHE/activations")


def test_a_local_file_that_speaks_of_a_group_is_refused(conf):
    (conf / "local.yaml").write_text("tracker: {entity: me}\n")
    with pytest.raises(ConfigError, match=r"local\.yaml: there is no key tracker; allowed are .*data_root"):
        resolve(compose(["tracker=wandb"]))


# --- Data -------------------------------------------------------------------------------------------------------------


def test_files_are_looked_for_below_the_working_folder(monkeypatch):
    monkeypatch.delenv("IMMUNIZATION_DATA_ROOT", raising=False)
    cfg = compose(["experiment=vit_cars_small"])
    assert cfg.data_root == "data"
    assert cfg.model.checkpoint == "data/weights/vit_tiny_patch16_224.safetensors"


def test_the_page_on_installing_names_the_data_of_every_experiment():
    page = (ROOT / "docs" / "install.md").read_text()
    table = page[page.index("## Data") : page.index("## Debug")]
    assert set(EXPERIMENTS) <= set(re.findall(r"`([\w/]+)`", table))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import os\n\nimport no_such_thing\n", "{file}, line 3: ModuleNotFoundError: No module named 'no_such_thing'"),
        ("class A:\n    x = undefined\n", "{file}, line 2: NameError: name 'undefined' is not defined"),
        ("class A:\n    x = (\n", "{file}, line 2: SyntaxError: '(' was never closed"),
        (None, "there is no module {module}; install it, or put its folder into PYTHONPATH"),
    ],
)
def test_an_error_in_a_module_of_the_user_is_told_once_with_its_place(
    text, message, tmp_path, monkeypatch, capfd, config
):
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / f"mine_{abs(hash(message))}.py"
    if text:
        file.write_text(text)
    config.method, config.trusted = {"_target_": f"{file.stem}.A"}, [file.stem]
    with pytest.raises(ConfigError) as caught:
        build(config, "method")
    said = str(caught.value)
    assert said.startswith(f"method._target_={file.stem}.A: ")
    assert said.endswith(message.format(file=file, module=file.stem))
    assert "\n" not in said
    assert capfd.readouterr() == ("", "")


def test_what_stands_in_a_yaml_and_in_code_says_the_same():
    """Keys inside of an option, which are defaults of what reads them, and the rates that a search begins with."""
    rates = defaultdict(dict)
    for source, opens, keeps in (("image_folders", open_task, open_unlabeled), ("text", open_text, open_kept)):
        for role in ("primary", "harmful", "benign", "unseen", "keep"):
            parts, written = (
                inspect.signature(keeps if role == "keep" else opens).parameters,
                read_yaml(f"dataset/{source}")[role],
            )
            assert written == {name: parts[name].default for name in written}
    assert read_yaml("dataset/text")["csv"] == read_yaml("dataset/arrays")["csv"]
    assert dialect_of(read_yaml("dataset/arrays")["csv"]) == dialect_of(None)
    for name in ("full_finetune", "full_finetune_adamw", "lora", "lora_sgd"):
        attack = build(compose([f"attack=[{name}]"]), f"attack.{name}")
        rates[type(attack)][attack.optimizer] = tuple(attack.rates)
    assert rates == {kind: kind.fixed_rates for kind in (FineTune, LoRA)}
