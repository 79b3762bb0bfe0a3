"""Folders of images: with and without splits, and those that are broken, empty, missing or disagree."""

import logging
import sys
import zlib

import numpy as np
import pytest
import torch
from helpers.images import draw_folder
from helpers.nets import build, open_pair
from PIL import Image

from immunization.data import image_folders
from immunization.data.image_files import DARK, read_image
from immunization.data.task import SPLITS
from immunization.errors import ConfigError, DataError

pytestmark = pytest.mark.trains


@pytest.fixture
def roots(tmp_path):
    """Folders of a primary and a harmful task, which a test may damage."""
    return draw_folder(tmp_path / "p", 4, 6, 2, 0), draw_folder(tmp_path / "h", 3, 6, 2, 1)


def test_bad_images_are_named_or_left_out(roots, tmp_path, caplog):
    good = (roots[1] / "train/class0/0.png").read_bytes()
    (roots[1] / "train/class0/0.png").write_bytes(good[: len(good) // 2])  # truncated
    (roots[1] / "train/class1/3.png").write_bytes(b"no image")
    huge = good[:16] + (10**5).to_bytes(4) * 2 + good[24:29]  # the size stands in the header
    (roots[1] / "train/class2/1.png").write_bytes(huge + zlib.crc32(huge[12:]).to_bytes(4) + good[33:])
    options = {"val_fraction": 0.0}
    pair = open_pair(roots, None, **options)
    names = r"class0/0\.png.*class1/3\.png.*class2/1\.png: Image size.*on_bad_image=skip"
    with pytest.raises(DataError, match=r"3 unreadable images: .*" + names):
        build(pair).read(pair, True)
    pair = open_pair(roots, tmp_path / "cache", on_bad_image="skip", **options)
    for _ in range(2):  # also from the cache
        _, tasks = build(pair).read(pair, True)
        assert len(tasks.harmful.train) == 15


def test_rows_of_a_task_are_those_of_its_images_where_some_are_left_out(roots, tmp_path):
    (roots[1] / "train/class0/2.png").write_bytes(b"no image")
    pair = open_pair(roots, None, on_bad_image="skip", val_fraction=0.0)
    model, tasks = build(pair).read(pair, False)
    train, rows = tasks.harmful.train, torch.tensor([1, 2, 16])
    assert len(train) == len(train.origin.rows) == 17
    images, labels = (torch.cat(parts) for parts in zip(*model.image_batches("harmful", "train", rows), strict=True))
    assert torch.equal(model.trunk(images), train.x[rows])
    assert torch.equal(labels, train.y[rows])


def test_images_of_other_folders_that_cannot_be_read_are_named(roots, tmp_path):
    more = draw_folder(tmp_path / "k", 2, 6, 2, 2)
    (more / "train/class1/0.png").write_bytes(b"no image")
    for how in ("error", "skip"):
        pair = open_pair(roots, None, on_bad_image=how, keep_root=str(more), val_fraction=0.0)
        model, _ = build(pair).read(pair, False)
        if how == "error":
            with pytest.raises(DataError, match=r"1 unreadable image: .*class1/0\.png"):
                model.kept()
        else:
            assert len(model.kept()) == 15  # train and val


def test_only_the_primary_task_has_outputs(roots, tmp_path):
    with pytest.raises(ConfigError, match=r"dataset\.harmful\.outputs: only the primary task"):
        open_pair(roots, None, harmful={"outputs": "names.csv"})


def test_a_link_back_into_the_images_is_refused(roots, tmp_path):
    (roots[1] / "train/class1/back").symlink_to(roots[1] / "train")
    with pytest.raises(
        DataError,
        match=r"train/class1/back/class\d is a link to .*/train/class\d, whose images would be read twice; remove",
    ):
        open_pair(roots, None)
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(DataError, match=r"dataset\.harmful_root: folder .*circle not found"):
        open_pair((roots[0], tmp_path / "circle"))


def test_folders_that_are_missing_or_disagree(roots, tmp_path):
    with pytest.raises(DataError, match=r"dataset\.harmful_root: folder .*/nowhere not found; .*docs/install\.md"):
        open_pair((roots[0], tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"dataset\.primary_root is not set"):
        image_folders(None, str(roots[1]))
    (roots[1] / "val/class2").rename(roots[1] / "val/other")
    with pytest.raises(DataError, match="class other is not in"):
        open_pair(roots, None)
    (tmp_path / "flat").mkdir()
    with pytest.raises(DataError, match="holds no folders"):
        open_pair((roots[0], tmp_path / "flat"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({"source": name}, f"harmful.source={name} is not a source with splits; write one of")
            for name in ("foo", "hfds", "torch/folder", "x/y", "wds/y", "tfds/y")
        ),
        ({"train": "val"}, r"harmful\.train=val and dataset\.harmful\.test=val are the same images"),
        ({"test": "training"}, r"harmful\.train=train and dataset\.harmful\.test=training are the same images"),
        ({"classes": "0:1"}, r"harmful\.classes=0:1: at least two different classes"),
        (5, "dataset.harmful must be a mapping of keys to values, or null, not 5"),
        ({"tests": "val"}, "there is no key dataset.harmful.tests; allowed here are source, train, test, classes, "),
        ({"train": 5}, "dataset.harmful.train must be text, not 5"),
        ({"train": "one", "test": "none"}, r"harmful\.classes=null: at least two different classes"),
    ],
    ids=str,
)
def test_options_of_a_task_that_are_none_or_leave_one_split_or_class(roots, tmp_path, options, message):
    (roots[1] / "training").symlink_to(roots[1] / "train")
    (roots[1] / "one/class0").mkdir(parents=True)
    with pytest.raises(ConfigError, match=message):
        open_pair(roots, None, harmful=options)


def test_one_folder_without_splits(tmp_path, folders):
    flat = folders[0] / "train"
    pair = open_pair((flat, folders[1]), test_fraction=0.25)
    assert [len(pair.tasks["primary"].splits[split]) for split in SPLITS] == [52, 8, 20]


def test_equal_tasks_are_refused(folders, monkeypatch):
    with pytest.raises(ConfigError, match=r"class folder .* belongs to the primary task and to the harmful task"):
        open_pair((folders[0], folders[0]))
    with pytest.raises(ConfigError, match="to the harmful task and to the benign task"):
        open_pair(folders, benign_root=str(folders[1]))
    source = {"source": "hfds/a/b"}
    monkeypatch.setattr(sys.modules[image_folders.__module__], "_open_source", lambda *_: [0] * 20)
    with pytest.raises(ConfigError, match=r"hfds/a/b .* belongs to the primary task and to the harmful task"):
        open_pair((folders[0] / "train",) * 2, primary=source, harmful=source)


def test_images_of_other_kinds_are_counted_and_keep_their_content(roots, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    place, ramp = roots[1] / "train/class0", np.arange(36 * 40).reshape(36, 40) * 45
    Image.fromarray(ramp.astype(np.uint16)).save(place / "0.png")
    Image.fromarray((ramp >> 8).astype(np.uint8)).save(place / "1.png")
    Image.new("L", (1, 1)).save(place / "2.png")
    Image.new("CMYK", (40, 36)).save(place / "3.jpg")
    pair = open_pair(roots, None, val_fraction=0.0)
    _, tasks = build(pair).read(pair, True)
    (line,) = [record.getMessage() for record in caplog.records if "8 bits" in record.getMessage()]
    start = "harmful/train: 19 images, all read as RGB with 8 bits; among them "
    assert line.startswith(start)
    assert set(line.removeprefix(start).split(", ")) == {"16 bit: 1", "gray: 2", "CMYK: 1", "1 x 1 pixel: 1"}
    sixteen, eight = tasks.harmful.train.x[:2]
    assert (sixteen == eight).all()


def test_images_of_16_bits_that_are_all_nearly_black_are_told(roots, caplog):
    """12 bits in 16: the file does not say so. Beside one with larger values they are dark images."""
    place, ramp = roots[1] / "train/class0", np.arange(36 * 40, dtype=np.uint16).reshape(36, 40)
    Image.fromarray(ramp).save(place / "0.png")
    Image.fromarray(np.zeros_like(ramp)).save(place / "1.png")  # a black image stays black
    colors = b"".join(b"\0" + row.repeat(3).astype(">u2").tobytes() for row in ramp)  # which Pillow does not write
    parts = (
        (b"IHDR", bytes([0, 0, 0, 40, 0, 0, 0, 36, 16, 2, 0, 0, 0])),
        (b"IDAT", zlib.compress(colors)),
        (b"IEND", b""),
    )
    chunks = (len(data).to_bytes(4) + kind + data + zlib.crc32(kind + data).to_bytes(4) for kind, data in parts)
    (place / "2.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))
    assert [read_image(str(place / f"{i}.png"))[1] for i in range(3)] == [[DARK]] * 3
    assert np.array_equal(*(np.asarray(read_image(str(place / f"{i}.png"))[0]) for i in (0, 2)))
    told = "harmful/train: 18 images, of which all 3 of 16 bits are below 4096, so nearly black as they are read"
    pair = open_pair(roots, None, val_fraction=0.0)
    build(pair).read(pair, True)
    assert told in caplog.text
    caplog.clear()
    Image.fromarray(16 * ramp).save(place / "3.png")
    pair = open_pair(roots, None, val_fraction=0.0)
    build(pair).read(pair, True)
    assert "nearly black" not in caplog.text


def test_a_source_without_its_package_says_what_to_do(monkeypatch, folders, capsys):
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.delitem(sys.modules, "timm.data.readers.reader_hfds", raising=False)
    remedy = r"install it with pip, or dataset\.harmful_root=<folder> dataset\.harmful\.source= reads a folder"
    with pytest.raises(ConfigError, match=rf"dataset\.harmful\.source=hfds/a/b: .*datasets.*; {remedy}"):
        image_folders(str(folders[0]), harmful={"source": "hfds/a/b"})
    assert not capsys.readouterr().out
