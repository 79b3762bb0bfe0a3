"""Folders of images: with and without splits, and those that are broken, empty, missing or disagree."""

import zlib

import pytest
from helpers.images import draw_folder
from helpers.nets import build, open_pair

from immunization.data import image_folders
from immunization.data.task import SPLITS
from immunization.errors import ConfigError, DataError

pytestmark = pytest.mark.trains


def test_bad_images_are_named_or_left_out(tmp_path, caplog):
    folders = draw_folder(tmp_path / "p", 4, 6, 2, 0), draw_folder(tmp_path / "h", 3, 6, 2, 1)
    good = (folders[1] / "train/class0/0.png").read_bytes()
    (folders[1] / "train/class0/0.png").write_bytes(good[: len(good) // 2])  # truncated
    (folders[1] / "train/class1/3.png").write_bytes(b"no image")
    huge = good[:16] + (10**5).to_bytes(4) * 2 + good[24:29]  # the size stands in the header
    (folders[1] / "train/class2/1.png").write_bytes(huge + zlib.crc32(huge[12:]).to_bytes(4) + good[33:])
    options = {"val_fraction": 0.0}
    pair = open_pair(folders, **options)
    names = r"class0/0\.png.*class1/3\.png.*class2/1\.png: Image size.*on_bad_image=skip"
    with pytest.raises(DataError, match=r"3 images cannot be read: .*" + names):
        build(pair).read_tasks(pair, True)
    pair = open_pair(folders, tmp_path / "cache", on_bad_image="skip", **options)
    for _ in range(2):  # also from the cache
        _, tasks = build(pair).read_tasks(pair, True)
        assert len(tasks.harmful.train) == 15


def test_empty_class_folder(tmp_path):
    folders = draw_folder(tmp_path / "p", 4, 6, 2, 0), draw_folder(tmp_path / "h", 3, 6, 2, 1)
    for path in (folders[1] / "train/class1").iterdir():
        path.unlink()
    with pytest.raises(DataError, match=r"train/class1: the class folder is empty"):
        open_pair(folders)


def test_a_link_back_into_the_images_is_refused(tmp_path):
    folders = draw_folder(tmp_path / "p", 4, 6, 2, 0), draw_folder(tmp_path / "h", 3, 6, 2, 1)
    (folders[1] / "train/class1/back").symlink_to(folders[1] / "train")
    with pytest.raises(
        DataError, match=r"train/class1/back/class\d is .*/train/class\d once more: remove the symbolic"
    ):
        open_pair(folders)
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(DataError, match=r"dataset\.harmful_root=.*no such folder"):
        open_pair((folders[0], tmp_path / "circle"))


def test_folders_that_are_missing_or_disagree(tmp_path):
    folders = draw_folder(tmp_path / "p", 4, 6, 2, 0), draw_folder(tmp_path / "h", 3, 6, 2, 1)
    with pytest.raises(DataError, match=r"dataset\.harmful_root=.*no such folder"):
        open_pair((folders[0], tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"dataset\.primary_root is not set"):
        image_folders(None, str(folders[1]))
    (folders[1] / "val/class2").rename(folders[1] / "val/other")
    with pytest.raises(DataError, match="class other is not in"):
        open_pair(folders)
    (tmp_path / "flat").mkdir()
    with pytest.raises(DataError, match="holds no folders"):
        open_pair((folders[0], tmp_path / "flat"))


def test_one_folder_without_splits(tmp_path, folders):
    flat = folders[0] / "train"
    pair = open_pair((flat, folders[1]), test_fraction=0.25)
    assert [len(pair.tasks["primary"].splits[split]) for split in SPLITS] == [52, 8, 20]
