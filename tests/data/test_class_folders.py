"""Class folders: which output means which, which files are read as what, and what is said of the others."""

import io
import json
import logging
import os
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from helpers.images import draw_folder
from helpers.nets import build, open_pair
from PIL import Image

from immunization.config import compose
from immunization.data import image_folders
from immunization.data.class_folders import in_order, natural_key
from immunization.data.image_files import FORMATS, read_image
from immunization.data.image_folders import open_task
from immunization.data.images import ImageSplit, ImageTask, Readable, Unreadable
from immunization.errors import ConfigError, DataError
from immunization.evaluation import Comparison, OtherClasses
from immunization.experiment import resolve
from immunization.models import FittedNet
from immunization.models.reading import outputs_of
from immunization.models.timm import Timm
from immunization.runner import run

pytestmark = pytest.mark.trains

CAPITAL = ("Leopards", "ant", "bee", "crab")
NUMBERS = tuple(map(str, range(12)))


def renamed(root: Path, names: tuple[str, ...]) -> Path:
    """Folders of images, class0, class1, ... called by `names`."""
    for split in root.iterdir():
        for i, name in enumerate(names):
            (split / f"class{i}").rename(split / name)
    return root


def drawn(root: Path, names: tuple[str, ...], train: int = 8, val: int = 3, seed: int = 0) -> Path:
    return renamed(draw_folder(root, len(names), train, val, seed), names)


def folder_of(root: Path, images: dict[str, Image.Image]) -> Path:
    """A folder of images by path."""
    for name, image in images.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        image.save(root / name)
    return root


def opened(root: Path, role: str = "harmful", **options) -> ImageTask:
    """The task of a folder none of whose training images are withheld."""
    return open_task(role, str(root), 0.0, 0.0, 0, **options)


def picture(seed: int = 0, mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (36, 40, 3)).astype(np.uint8)
    return Image.fromarray(pixels).convert(mode)


# order


def test_natural_order_is_that_of_timms_reader(tmp_path):
    names = ("Zebra", "ant", "b10", "b2", "Ant3", "n01", "10", "9", "x.y-2", "é", "ß")
    for name in names:
        folder_of(tmp_path, {f"{name}/0.png": picture()})
    reader = timm.data.create_dataset("", root=str(tmp_path)).reader
    assert list(reader.class_to_idx) == list(in_order(names, "natural")) != list(in_order(names, "text"))
    assert in_order(("1", "²"), "natural") == ("1", "²")  # of which timm's reader makes no number


@pytest.mark.parametrize("net", ["test_resnet", "test_vit"])
@pytest.mark.parametrize("names", [CAPITAL, NUMBERS], ids=("capital", "numbers"))
def test_a_head_fitted_in_timms_order_is_read_in_it(tmp_path, names, net):
    """Its labels are those of the reader; in any other order the accuracy is that of a permutation."""
    roots = drawn(tmp_path / "p", names), draw_folder(tmp_path / "h", 2, 6, 2, 1)
    arguments = {"num_classes": len(names)} | ({"img_size": 32} if "vit" in net else {})
    torch.manual_seed(0)

    def made(**options) -> tuple[Timm, object]:
        pair = open_pair(roots, None, primary=options, val_fraction=0.0)
        torch.manual_seed(0)
        return Timm(pair, net, pretrained=False, arguments=arguments).read(pair, True)

    _, pair = made(order="natural")
    reader = timm.data.create_dataset("", root=str(roots[0] / "train"), search_split=False).reader
    assert pair.primary.names == tuple(reader.class_to_idx)
    split = pair.primary.train
    x = torch.cat([split.x, torch.ones(len(split), 1, dtype=split.x.dtype)], 1)
    head = torch.linalg.lstsq(x, torch.nn.functional.one_hot(split.y).to(x), driver="gelsd").solution.T
    for order, right in (("natural", True), ("text", False)):
        task = made(order=order)[1].primary
        logits = torch.nn.functional.linear(split.x, head[:, :-1], head[:, -1])
        assert (task.measure(logits, task.train.y) > 0.95) == right
    with pytest.raises(
        ConfigError, match=rf"order in which {net} counts .* is not known.*dataset\.primary\.order=text or natural, or "
    ):
        made()
    table = tmp_path / "outputs.csv"
    table.write_text("index,folder\n" + "".join(f"{i},{name}\n" for name, i in reader.class_to_idx.items()))
    by_table = made(outputs=str(table))[1].primary
    assert by_table.names == pair.primary.names
    assert torch.equal(by_table.test.y.sort().values, pair.primary.test.y.sort().values)
    assert (by_table.measure(torch.nn.functional.linear(split.x, head[:, :-1], head[:, -1]), by_table.train.y)) > 0.95


def test_folders_as_imagenetv2_has_them(tmp_path):
    folder_of(tmp_path, {f"{i}/0.png": Image.new("RGB", (2, 2)) for i in range(1000)})
    with pytest.raises(
        ConfigError, match=r"order in which .* counts the 1000 class folders is not known.* 1, 10, 100.* 1, 2, 3"
    ):
        outputs_of(opened(tmp_path, "primary"), 1000, "resnet18")
    task = opened(tmp_path, "primary", order="natural")
    outputs = outputs_of(task, 1000, "resnet18")
    assert [int(task.classes[label]) for label in outputs.argsort()] == list(range(1000))
    for path, label in task.splits["train"].dataset.samples:
        assert int(Path(path).parent.name) == outputs[label]


def test_where_the_order_says_nothing_it_is_not_asked_for(tmp_path):
    roots = draw_folder(tmp_path / "p", 4, 20, 3, 0), drawn(tmp_path / "h", NUMBERS)
    pair = open_pair(roots, None)  # class0 ... class3, and a harmful task to which a head is fitted anew
    assert build(pair).read(pair, True)[1].harmful.names == tuple(sorted(NUMBERS))
    synsets = ("n01440764", "n02102040", "n03888257")
    assert in_order(synsets, "text") == in_order(synsets, "natural")
    images = drawn(tmp_path / "imagenet", synsets, 1, 1)
    assert outputs_of(opened(images, "primary"), 1000, "net").tolist() == [0, 217, 701]
    renamed(roots[0], CAPITAL)
    pair = image_folders(*map(str, roots), cache=None, size=32).to("cpu", torch.float64)
    fitted = FittedNet(pair, fit_epochs=1, cache=str(tmp_path / "fitted"))  # to these very labels
    assert fitted.read(pair, True)[1].primary.names == CAPITAL


def test_names_that_are_alike_have_no_natural_order(tmp_path):
    images = folder_of(tmp_path, {f"{name}/0.png": picture() for name in ("cat", "Cat", "dog")})
    assert natural_key("Cat") == natural_key("cat")
    for order, message in ((None, "is not known"), ("natural", "Cat and cat are alike.*order=text or")):
        with pytest.raises(ConfigError, match=message):
            outputs_of(opened(images, "primary", order=order), 3, "net")
    assert outputs_of(opened(images, "primary", order="text"), 3, "net").tolist() == [0, 1, 2]


def test_other_classes_ask_for_the_order_too(tmp_path):
    roots = drawn(tmp_path / "p", CAPITAL), draw_folder(tmp_path / "h", 3, 6, 2, 1)
    (tmp_path / "outputs.csv").write_text("index,folder\n0,ant\n1,bee\n")
    own = {"classes": ["ant", "bee"], "outputs": str(tmp_path / "outputs.csv")}
    pair = open_pair(roots, None, primary=own)
    model, tasks = build(pair).read(pair, False)
    with pytest.raises(
        ConfigError, match=r"set evaluation\.other_classes\.order=text or natural, or evaluation\.other_"
    ):
        OtherClasses(root=str(roots[0] / "train"))(Comparison(tasks, model))
    other = OtherClasses(root=str(roots[0] / "train"), order="natural")(Comparison(tasks, model))
    assert other.about["other_classes"] == {"classes": 2, "images": 16}  # crab and Leopards, outputs 2 and 3


# the table


def test_the_table_of_outputs_and_folders_is_printed_and_kept(tmp_path, capsys, no_figures):
    roots = drawn(tmp_path / "p", CAPITAL), drawn(tmp_path / "h", NUMBERS, seed=1)
    options = [
        *("dataset=image_folders", "model=timm", "model.name=test_resnet", "model.pretrained=false", "dataset.size=32"),
        *("+model.arguments.num_classes=4", "method=identity", f"dataset.primary_root={roots[0]}", "evaluation=[rir]"),
        *(f"dataset.harmful_root={roots[1]}", "dataset.cache=null", "tracker=none", "dataset.primary.order=natural"),
    ]
    run([*options, "dataset.harmful.classes=[1,2,3]"], folder=tmp_path / "run")
    kept = json.loads((tmp_path / "run" / "classes.json").read_text())
    assert list(kept["primary"]) == ["ant", "bee", "crab", "Leopards"]
    assert kept["primary"]["Leopards"] == {"output": 3, "train": 8, "val": 0, "test": 3}
    assert list(kept["harmful"]) == ["1", "2", "3"]
    shown = capsys.readouterr().out
    assert "primary: 4 classes" in shown
    assert "  output 3: Leopards, 8 + 0 + 3\n" in shown
    assert "  output 3: Leopards, 8 + 0 + 3\n" in (tmp_path / "run" / "run.log").read_text()


def test_a_head_that_does_not_fit_is_found_before_an_image_is_read(tmp_path):
    roots = draw_folder(tmp_path / "p", 3, 4, 2, 0), draw_folder(tmp_path / "h", 2, 4, 2, 1)
    for path in tmp_path.glob("*/*/*/*.png"):
        path.write_bytes(b"no image")
    pair = open_pair(roots, None)
    with pytest.raises(ConfigError, match=r"has 4 outputs, .* 3 classes"):
        build(pair).read(pair, True)


def test_an_option_of_timm_is_told_where_it_belongs():
    options = ["dataset=image_folders", "model=timm", "model.name=test_resnet"]
    with pytest.raises(ConfigError, match=r"no key model\.num_classes; .*\+model\.arguments\.num_classes=<value>"):
        run([*options, "model.num_classes=5"])
    with pytest.raises(ConfigError, match=r"goes to \+model\.arguments\.<name>=<value>"):
        resolve(compose([*options, "+model.num_classes=5"]))


# dataset.primary.outputs


@pytest.mark.parametrize("header", ["index,folder", "folder,index", "n,index,folder"])
def test_the_column_of_indices_is_none_of_names(tmp_path, header):
    images = drawn(tmp_path / "p", NUMBERS, 1, 1)
    rows = [{"index": str(11 - i), "folder": str(i), "n": "600"} for i in range(12)]
    columns = header.split(",")
    table = tmp_path / "outputs.csv"
    table.write_text("\ufeff" + "\n".join([header, *(",".join(row[column] for column in columns) for row in rows)]))
    task = opened(images, "primary", outputs=str(table))
    assert dict(zip(task.classes, task.outputs, strict=True)) == {str(i): 11 - i for i in range(12)}


def test_tables_that_say_two_things(tmp_path):
    images = drawn(tmp_path / "p", ("0", "1", "2"), 1, 1)
    table = tmp_path / "outputs.csv"
    for text, message in (
        ("index,a,b\n0,0,2\n1,1,1\n2,2,0\n", "columns 'a' and 'b' name all class folders, and give them other outputs"),
        ("index,folder\n0,0\n1,1\n2,2\n0,1\n", "column folder names folder 1 more than once"),
        ("index\n0\n1\n2\n", "no column names all 3 class folders"),
    ):
        table.write_text(text)
        with pytest.raises(DataError, match=message):
            opened(images, "primary", outputs=str(table))
    table.write_text("index,a,b\n2,0,0\n1,1,1\n0,2,2\n")  # twice the same
    assert opened(images, "primary", outputs=str(table)).outputs == (2, 1, 0)


# classes


@pytest.mark.parametrize(
    ("classes", "order", "expected"),
    [
        ([1, 2, 3], None, ("1", "2", "3")),
        (["1", 2], None, ("1", "2")),
        ([10, 2], "natural", ("2", "10")),
        ("0:3", "text", ("1", "10", "11")),
        ("0:3", "natural", ("1", "2", "3")),
        (":", None, tuple(sorted(map(str, range(1, 13))))),
        ("1:4", None, r"harmful\.classes=1:4: the folders have numbers as names, .* 1, 10, 11, 12, \.\.\.; set "
         r"dataset\.harmful\.order="),
        ([0, 1], None, r"no folder is called 0; .*write the names in quotes"),
        ([1, 13], None, "no folder is called 13"),
        ([-1, -2], None, "-1 is neither one of the 12 class folders"),
    ],
    ids=str,
)  # fmt: skip
def test_numbers_are_names_where_folders_are_called_by_numbers(tmp_path, classes, order, expected):
    images = folder_of(tmp_path, {f"{i}/0.png": Image.new("RGB", (2, 2)) for i in range(1, 13)})
    if isinstance(expected, tuple):
        task = opened(images, classes=classes, order=order)
        assert task.classes == expected
        assert {Path(path).parent.name for path, _ in task.splits["train"].dataset.samples} == set(expected)
        return
    with pytest.raises(ConfigError, match=expected):
        opened(images, classes=classes, order=order)


@pytest.mark.parametrize("classes", [[1, 2, 3], [0, 5]])
def test_numbers_are_no_places_of_padded_numbers(tmp_path, classes):
    """`[1, 2, 3]` was 002, 003 and 004."""
    images = folder_of(tmp_path, {f"{i:03}/0.png": Image.new("RGB", (2, 2)) for i in range(1, 13)})
    with pytest.raises(
        ConfigError, match=r"numbers as names, 001, 002, 003, .*write the names in quotes, such as '00[15]'"
    ):
        opened(images, classes=classes)
    named = opened(images, classes=["001", "003"])
    assert named.classes == ("001", "003")


def test_names_of_splits_are_no_classes(tmp_path):
    for split in ("Train", "Test"):
        folder_of(tmp_path, {f"{split}/{name}/0.png": picture() for name in ("cat", "dog")})
    with pytest.raises(
        DataError, match=r"Test, Train are names of splits.*dataset\.harmful\.train and dataset\.harmful\.test"
    ):
        opened(tmp_path)
    named = opened(tmp_path, train="Train", test="Test")
    assert named.classes == ("cat", "dog")


# files


def test_images_of_every_suffix_are_read_and_others_are_counted(tmp_path, caplog):
    suffixes = [suffix for own in FORMATS.values() for suffix in own]
    images = {
        f"{name}/{i}{s}": picture(i) for name in ("ant", "bee") for i, s in enumerate([*suffixes, ".JPG", ".TiF"])
    }
    folder_of(tmp_path, {path: image for path, image in images.items() if Path(path).suffix not in (".jfif", ".jpe")})
    for name in ("ant", "bee"):
        for suffix in (".jfif", ".jpe"):
            picture().save(tmp_path / name / f"x{suffix}", "JPEG")
    for place in ("ant/a.avif", "ant/b.avif", "bee/boxes.txt", "bee/none", "loose.png", "classes.csv"):
        (tmp_path / place).write_bytes(b"something")
    for place in ("ant/.DS_Store", "ant/._0.png", "bee/Thumbs.db", "__MACOSX/ant/._0.png", "ant/.cache/0.png"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_bytes(b"of a system")
    task = opened(tmp_path)
    assert task.classes == ("ant", "bee")
    train = task.splits["train"]
    assert train.labels.bincount().tolist() == [len(suffixes) + 2] * 2
    for path, _ in train.dataset.samples:
        image, _ = read_image(path)
        assert (image.mode, image.size) == ("RGB", (40, 36))
    expected = {".avif": 2, ".txt": 1, "without suffix": 1, "beside the class folders": 1}
    assert task.left_out == {"train": expected}
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert f"harmful/train: 5 files are left out below {tmp_path}: .avif: 2 (as ant/a.avif), " in line
    assert "beside the class folders: 1 (as loose.png)" in line


def test_the_top_folder_is_the_class(tmp_path):
    """Batches, folders `images` as Tiny ImageNet has them, and one that is called as another class."""
    places = ("ant/0.png", "ant/batch0/0.png", "ant/batch0/deeper/1.png", "ant/bee/2.png", "bee/images/0.png")
    folder_of(tmp_path / "train", {place: picture() for place in places})
    folder_of(tmp_path / "val", {"ant/x.png": picture(), "bee/images/y.png": picture()})
    task = opened(tmp_path)
    assert task.classes == ("ant", "bee")
    assert task.splits["train"].labels.tolist() == [0, 0, 0, 0, 1]
    assert task.splits["test"].labels.tolist() == [0, 1]
    (tmp_path / "val/images").mkdir()
    picture().save(tmp_path / "val/images/0.png")
    with pytest.raises(DataError, match=r"class images is not in .*dataset\.harmful\.test=none holds out images"):
        opened(tmp_path)


def test_images_to_keep_are_of_no_task_in_nested_folders_either(tmp_path):
    primary, harmful = draw_folder(tmp_path / "p", 2, 4, 2, 0), tmp_path / "h"
    folder_of(harmful, {f"{name}/batch{i}/0.png": picture(i) for name in ("ant", "bee") for i in range(4)})
    for keep in (harmful, harmful / "ant", harmful / "ant/batch0"):
        with pytest.raises(ConfigError, match=r"belongs to dataset\.keep_root and to the harmful task"):
            image_folders(str(primary), str(harmful), keep_root=str(keep))


def test_images_are_turned_by_their_tag_and_counted(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    upright, tags = picture(), range(1, 9)
    stored = {  # what a camera that is held so stores
        **{1: None, 2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 5: Image.Transpose.TRANSPOSE},
        **{4: Image.Transpose.FLIP_TOP_BOTTOM, 6: Image.Transpose.ROTATE_90, 7: Image.Transpose.TRANSVERSE},
        8: Image.Transpose.ROTATE_270,
    }
    for suffix in (".png", ".tif", ".webp"):
        for tag in tags:
            exif = Image.Exif()
            exif[0x0112] = tag
            image = upright if stored[tag] is None else upright.transpose(stored[tag])
            path = tmp_path / "h/train/ant" / f"{tag}{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path, exif=exif, **({"lossless": True} if suffix == ".webp" else {}))
            read, kinds = read_image(str(path))
            assert np.array_equal(np.asarray(read), np.asarray(upright)), path
            assert kinds == (["turned by its EXIF tag"] if tag > 1 else [])
    folder_of(tmp_path / "h", {"train/bee/0.png": picture(1), "val/ant/0.png": picture(2), "val/bee/0.png": picture(3)})
    roots = draw_folder(tmp_path / "p", 4, 4, 2, 0), tmp_path / "h"
    pair = open_pair(roots, None, val_fraction=0.0)
    build(pair).read(pair, True)
    assert "among them turned by its EXIF tag: 21" in caplog.text


def test_what_no_decoder_may_choose_is_unreadable_and_named(tmp_path):
    """Content decides, whatever the suffix; a link to nowhere, a pipe and a folder are said to be so."""
    good, place = picture(), tmp_path / "x"
    place.mkdir()
    good.save(place / "png.jpg", "PNG")
    assert np.array_equal(np.asarray(read_image(str(place / "png.jpg"))[0]), np.asarray(good))
    (place / "eps.png").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\nshowpage\n")
    good.save(place / "ico.png", "ICO")
    Image.fromarray(np.random.default_rng(0).random((4, 4)).astype(np.float32)).save(place / "floats.tif")
    Image.fromarray(np.arange(256, dtype=np.int32).reshape(16, 16)).save(place / "deep.tif")
    (place / "link.png").symlink_to("nowhere.png")
    (place / "folder.png").mkdir()
    (place / "empty.png").touch()
    os.mkfifo(place / "pipe.png")
    for name, why in {
        "eps.png": "no image of JPEG, PNG, ",
        "ico.png": "no image of JPEG, PNG, ",
        "floats.tif": "its pixels have neither 8 nor 16 bits",
        "deep.tif": "its pixels have 16 bits, all below 256, which would be black: save it with 8 bits",
        "link.png": "the link leads nowhere",
        "absent.png": "the file is gone",
        "folder.png": "it is not a regular file",
        "pipe.png": "it is not a regular file",
        "empty.png": "no image of",
    }.items():
        with pytest.raises(DataError, match=f"{name}: {why}"):
            read_image(str(place / name))


@pytest.mark.parametrize("how", ["error", "skip"])
def test_a_link_to_nowhere_is_an_unreadable_image(tmp_path, how):
    roots = draw_folder(tmp_path / "p", 4, 6, 2, 0), draw_folder(tmp_path / "h", 3, 6, 2, 1)
    (roots[1] / "train/class0/9.png").symlink_to(tmp_path / "nowhere.png")
    (roots[1] / "train/class1/batch").symlink_to(tmp_path / "nowhere")
    pair = open_pair(roots, None, on_bad_image=how, val_fraction=0.0)
    assert pair.about["left_out"] == {"harmful": {"train": {"without suffix": 1}}}
    if how == "error":
        with pytest.raises(DataError, match=r"1 unreadable image: .*class0/9\.png: the link leads nowhere"):
            build(pair).read(pair, True)
    else:
        assert len(build(pair).read(pair, True)[1].harmful.train) == 18


def test_an_empty_class_says_what_it_holds(tmp_path):
    folder_of(tmp_path, {"ant/0.png": picture()})
    (tmp_path / "bee").mkdir()
    (tmp_path / "bee/0.avif").touch()
    with pytest.raises(DataError, match=r"bee: the class folder is empty, it holds no image \(\.avif: 1\)"):
        opened(tmp_path)


class Packed(timm.data.readers.reader.Reader):
    """Images that lie in no files of their own, as those of a hub's tables."""

    def __init__(self, images: list[bytes]) -> None:
        super().__init__()
        self.images = images

    def __getitem__(self, i: int) -> tuple[io.BytesIO, int]:
        return io.BytesIO(self.images[i]), i

    def __len__(self) -> int:
        return len(self.images)

    def _filename(self, i: int, basename: bool = False, absolute: bool = False) -> str:
        return str(i)


def test_no_other_image_stands_in_for_one_of_a_source_that_cannot_be_read():
    stored = io.BytesIO()
    picture().save(stored, "PNG")
    data = timm.data.ImageDataset("", reader=Packed([stored.getvalue(), b"no image", stored.getvalue()]))
    images = Readable(ImageSplit(data, torch.tensor([0, 1]), "", ""))
    images.transform = np.asarray
    (first, label, kinds), second = images[0], images[1]
    assert (np.array_equal(first, np.asarray(picture())), label, kinds) == (True, 0, [])
    assert second == Unreadable(1, "image 1: no image of JPEG, PNG, WEBP, BMP, TIFF, GIF, PPM")
