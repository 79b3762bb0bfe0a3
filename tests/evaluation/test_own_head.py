"""A net's own head on classes outside D_P."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.nets import build, open_pair

from immunization.errors import ConfigError, DataError
from immunization.evaluation import Comparison, OtherClasses
from immunization.methods import ClosedForm

pytestmark = pytest.mark.trains


@pytest.fixture
def outputs(tmp_path: Path) -> str:
    """Class folders in another order than the outputs of the head."""
    path = tmp_path / "outputs.csv"
    path.write_text("index,folder\n" + "".join(f"{3 - i},class{i}\n" for i in range(4)))
    return str(path)


@pytest.fixture
def opened(folders, outputs):
    """A net with four outputs, of which two are classes of D_P, and what reads it."""
    pair = open_pair(folders, primary={"classes": "0:2", "outputs": outputs})
    return build(pair, trainable="last"), pair


@torch.no_grad()
def test_accuracy_and_share_taken_for_primary(opened, folders, outputs):
    net, pair = opened
    model, tasks = net.read(pair, False)
    model.head.weight.mul_(torch.tensor([[1.0], [-1.0], [2.0], [-2.0]]))  # predictions of several classes
    measures = OtherClasses(root=str(folders[0] / "train"), outputs=outputs)(Comparison(tasks, model))
    everything = open_pair(folders, primary={"outputs": outputs}, val_fraction=0)
    other = build(everything)
    other.read(everything, True)
    x, y = (torch.cat(parts) for parts in zip(*other.image_batches("primary", "train"), strict=True))
    predicted = model.deployed()(x[y < 2]).argmax(1)  # class2 and class3 are outputs 1 and 0
    assert 0 < (predicted == y[y < 2]).double().mean() < 1
    assert measures.metrics["other_classes/accuracy"] == (predicted == y[y < 2]).double().mean()
    assert measures.metrics["other_classes/called_primary"] == (predicted > 1).double().mean()
    assert measures.metrics["other_classes/accuracy_baseline"] is None
    assert "audit" in measures.reasons["other_classes/accuracy_baseline"]
    start = {name: tensor.clone() for name, tensor in model.extractor.state_dict().items()}
    for tensor in model.extractor.parameters():
        tensor.zero_()
    trained = OtherClasses(root=str(folders[0] / "train"), outputs=outputs)(Comparison(tasks, model, start))
    first = build(open_pair(folders, primary={"classes": "0:2", "outputs": outputs}), trainable="last")
    assert (
        trained.metrics["other_classes/accuracy_baseline"]
        == (first.deployed()(x[y < 2]).argmax(1) == y[y < 2]).double().mean()
    )
    zeroed = model.deployed()(x[y < 2]).argmax(1)
    assert trained.metrics["other_classes/called_primary"] == (zeroed > 1).double().mean()
    assert not torch.equal(zeroed, predicted)
    model.extractor.load_state_dict(start)
    assert measures.about["other_classes"] == {"classes": 2, "images": 40}
    some = OtherClasses(root=str(folders[0] / "train"), classes="1:3", outputs=outputs)(Comparison(tasks, model))
    assert some.about["other_classes"] == {"classes": 1, "images": 20}


@torch.no_grad()
def test_images_at_twice_the_size(opened, folders, outputs):
    net, pair = opened
    model, tasks = net.read(pair, False)
    start = {name: tensor.clone() for name, tensor in model.extractor.state_dict().items()}
    measures = OtherClasses(root=str(folders[0] / "train"), outputs=outputs, enlarged=True)(
        Comparison(tasks, model, start)
    )
    everything = open_pair(folders, primary={"outputs": outputs}, val_fraction=0)
    other = build(everything)
    other.read(everything, True)
    x, y = (torch.cat(parts) for parts in zip(*other.image_batches("primary", "train"), strict=True))
    larger = F.interpolate(x[y < 2], scale_factor=2, mode="bilinear")
    hits = (model.deployed()(larger).argmax(1) == y[y < 2]).double().mean()
    for end in ("", "_baseline"):
        assert measures.metrics[f"other_classes/accuracy_enlarged{end}"] == hits
    assert measures.metrics["other_classes/accuracy"] is not None


def test_a_net_of_one_size_says_so(folders, outputs):
    pair = open_pair(folders, primary={"classes": "0:2", "outputs": outputs})
    model, tasks = build(pair, "vit_tiny_patch16_224").read(pair, False)
    measures = OtherClasses(root=str(folders[0] / "train"), outputs=outputs, enlarged=True)(Comparison(tasks, model))
    assert measures.metrics["other_classes/accuracy"] is not None
    assert measures.metrics["other_classes/accuracy_enlarged"] is None
    assert measures.reasons["other_classes/accuracy_enlarged"] == "the net reads images of one size"


def test_a_folded_map_changes_no_prediction(opened, folders, outputs):
    model, tasks = opened[0].read(opened[1], True)
    method = ClosedForm(ridge=1e-5)
    method.setup(model, tasks)
    method.finish(model)
    metrics = OtherClasses(root=str(folders[0] / "train"), outputs=outputs)(Comparison(tasks, model)).metrics
    for name in ("accuracy", "called_primary"):
        assert metrics[f"other_classes/{name}"] == metrics[f"other_classes/{name}_baseline"] is not None


def test_what_cannot_be_measured_is_said(opened, folders, outputs, tmp_path):
    model, tasks = opened[0].read(opened[1], False)
    nothing = OtherClasses()(Comparison(tasks, model))
    assert nothing.metrics["other_classes/accuracy"] is None
    assert "root names no folder" in nothing.reasons["other_classes/accuracy_baseline"]
    only_primary = tmp_path / "two"
    for name in ("class0", "class1"):
        (only_primary / name).mkdir(parents=True)
        shutil.copy(folders[0] / "train" / name / "0.png", only_primary / name)
    with pytest.raises(DataError, match="every class in it is one of the primary task"):
        OtherClasses(root=str(only_primary), outputs=outputs)(Comparison(tasks, model))
    with pytest.raises((ConfigError, DataError), match=r"evaluation\.other_classes\.classes"):
        OtherClasses(root=str(folders[0] / "train"), classes="90:95", outputs=outputs)(Comparison(tasks, model))
    with pytest.raises(DataError, match=r"evaluation\.other_classes\.root: folder"):
        OtherClasses(root=str(tmp_path / "none"), outputs=outputs)(Comparison(tasks, model))
    held = {"keep_root": str(folders[0] / "train"), "keep": {"classes": "2:4"}}
    one = held | {"keep": {"classes": "2:3"}}
    for keep, root, message in ((held, "train", "or of dataset.keep_root"), (held, "val", "or of"), (one, "train", "")):
        pair = open_pair(folders, primary={"classes": "0:2", "outputs": outputs}, **keep)
        other = OtherClasses(root=str(folders[0] / root), outputs=outputs)
        read = build(pair).read(pair, False)
        if message:
            with pytest.raises(DataError, match=message):
                other(Comparison(read[1], read[0]))
        else:
            assert other(Comparison(read[1], read[0])).about["other_classes"] == {"classes": 1, "images": 20}
    pair = open_pair(folders, primary={"outputs": outputs})
    whole, every = build(pair).read(pair, False)
    assert not OtherClasses(root=str(only_primary))(Comparison(every, whole)).metrics  # the head has no other class
