"""Activations of the frozen part: kept, verified, streamed and read once."""

import os
import resource
import signal
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from helpers.nets import build, open_pair
from helpers.processes import ended, in_a_child
from torch import nn

from immunization.data.task import SPLITS
from immunization.errors import DataError
from immunization.methods import ConditionNumber
from immunization.models.activations import Stream, collect, fingerprint, load, take
from immunization.models.timm import Timm
from immunization.terminal import where
from immunization.training.batches import Batches, LoaderPasses, PairedBatches, batches_of

pytestmark = pytest.mark.trains


def test_activations_are_kept_verified_and_keyed(folders, tmp_path, caplog):
    cache = tmp_path / "cache"
    pair = open_pair(folders, cache)
    _, tasks = build(pair).read(pair, False)
    entries = sorted(cache.glob("[!.]*"))
    assert entries
    stamps = {path: path.stat().st_mtime_ns for path in entries}
    _, again = build(pair).read(pair, False)
    assert stamps == {path: path.stat().st_mtime_ns for path in sorted(cache.glob("[!.]*"))}
    torch.testing.assert_close(again.primary.train.x, tasks.primary.train.x, rtol=0, atol=0)
    other = open_pair(folders, cache, crop_pct=0.5)
    build(other).read(other, False)
    assert len(list(cache.glob("[!.]*"))) == 2 * len(entries)

    content = bytearray(entries[0].read_bytes())
    content[-7] ^= 1
    entries[0].write_bytes(bytes(content))
    assert load(cache, entries[0].stem) is None
    assert not entries[0].exists()


def test_reading_says_how_many_images_are_done():
    batches = [(torch.ones(n, 3), torch.zeros(n, dtype=torch.long), []) for n in (3, 2)]
    said = []
    collect(batches, lambda images, _: said.append(where()) or {"x": images}, {"x": "key"}, None, "train: 5 images")
    streamed = Stream(lambda size: batches, lambda images: said.append(where()) or images, (5, 3))
    assert len(torch.cat(list(streamed.split(3)))) == 5
    assert said == [f"{of}, {done} done" for of in ("train: 5 images", "activations of 5 inputs") for done in (0, 3)]


def test_entries_that_two_nets_share_are_computed_once(tmp_path):
    """Two nets of one trunk have different features, and the same inputs. What a killed run left of them goes."""
    seen, begun, other = [], threading.Event(), tmp_path / ".other.part"
    for left in (tmp_path / ".shared.part", other):
        left.touch()

    def loader(own):
        for _ in range(2):
            seen.append(own)
            begun.set()
            time.sleep(0.2)
            yield torch.ones(2, 3), torch.zeros(2, dtype=torch.long), []

    def one(own):
        keys = {"features": own, "inputs": "shared"}
        return collect(loader(own), lambda x, missing: dict.fromkeys(missing, x), keys, tmp_path, "four images")

    first = threading.Thread(target=one, args=["b"])
    first.start()
    assert begun.wait(60)
    assert len(one("a")["inputs"].x) == 4
    first.join(60)
    assert len(load(tmp_path, "b").x) == len(load(tmp_path, "a").x) == 4
    assert seen == ["b", "b", "a", "a"]
    names = {f"{key}.safetensors" for key in ("a", "b", "shared")}
    assert {path.name for path in tmp_path.iterdir()} == {*names, other.name, ".locks"}


def test_tasks_hold_what_the_extractor_reads(folders):
    pair = open_pair(folders, None)
    model, tasks = build(pair).read(pair, False)
    sizes = {role: [len(getattr(task, split)) for split in SPLITS] for role, task in tasks.tasks.items()}
    assert sizes == {"primary": [72, 8, 24], "harmful": [66, 6, 24]}
    assert tasks.primary.rank == 72
    assert tasks.dim == 96
    x = tasks.primary.train.x
    torch.testing.assert_close(model.features(x), model.reference["primary", "train"])


def test_large_sets_are_streamed(folders):
    pair = open_pair(folders, None, cache_limit=0.0)
    model, tasks = build(pair).read(pair, False)
    kept, kept_tasks = build(open_pair(folders, None)).read(open_pair(folders, None), False)
    stream = tasks.harmful.train.x
    assert isinstance(stream, Stream)
    torch.testing.assert_close(model.features(stream), kept.features(kept_tasks.harmful.train.x))
    rows = torch.tensor([50, 3, 7])
    torch.testing.assert_close(take(stream, rows), kept_tasks.harmful.train.x[rows])
    batches = batches_of(model, tasks, 16, torch.Generator())
    assert not isinstance(batches, PairedBatches)
    assert batches.steps_per_epoch == 4
    (primary, harmful), *_ = batches.epoch()
    assert primary.x.shape == harmful.x.shape == (16, *stream.shape[1:])
    for batch, whole in ((primary, kept_tasks.primary.train.x), (harmful, kept_tasks.harmful.train.x)):
        nearest = torch.cdist(batch.x.flatten(1), whole.flatten(1)).min(1).values
        assert nearest.max() < 1e-6  # images are prepared as those that are measured
    terms = ConditionNumber(lambda_P=1.0, lambda_H=1.0, epochs=1, batch_size=16, precondition="none", balance=False)
    terms.setup(model, tasks)
    assert torch.isfinite(terms.step(model, primary, harmful)["loss"])


def test_fewer_images_than_a_batch_are_refused(folders):
    pair = open_pair(folders, None, cache_limit=0.0)
    model, tasks = build(pair).read(pair, False)
    with pytest.raises(DataError, match="the harmful loader gives no batches: it has fewer images than one"):
        next(batches_of(model, tasks, 70, torch.Generator()).epoch())  # of 72 and 66 images
    loaders = {"harmful": [(torch.ones(2, 3), torch.zeros(2))], "primary": []}
    passes = {role: LoaderPasses(one, role, lambda _, *xy: xy, 3) for role, one in loaders.items()}
    with pytest.raises(DataError, match="the primary loader gives no batches"):
        next(Batches(passes).epoch())


def test_augmentation_turns_the_cache_of_activations_off(folders):
    pair = open_pair(folders, None, augment=True)
    model, tasks = build(pair).read(pair, False)
    assert isinstance(tasks.primary.train.x, Stream)
    batches = batches_of(model, tasks, 16, torch.Generator())
    first, second = (next(iter(batches.epoch()))[1].x for _ in range(2))
    assert not torch.equal(first, second)


def test_a_net_has_the_same_fingerprint_with_every_version_of_torch():
    """Published curves of theta_0 are found by it; torch from 2.12 on prints whether a norm has a bias."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.Linear(4, 2))
    for value in (*net.parameters(), *net.buffers()):
        value.detach().fill_(1)
    assert fingerprint([net]).startswith("ebc0c0bff21be058")
    without = nn.Sequential(*net[:3], nn.Linear(4, 2, bias=False))
    without[3].weight = net[3].weight
    assert fingerprint([without]) != fingerprint([net])


def unlabeled(count: int):
    """A loader of one batch, and the key under which what is made of it is kept."""
    return [(torch.ones(count, 1), torch.zeros(count, dtype=torch.long), [])], {"x": "key"}


@pytest.fixture
def shared():
    """A folder that every account may enter, of which only this one may write."""
    if os.geteuid():
        pytest.skip("only root can act as another account")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def as_another_account(work) -> int:
    """The exit code of a child that does `work` as nobody."""

    def other() -> None:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        work()

    return ended(in_a_child(other))


def test_another_account_reads_what_this_one_keeps(shared):
    batches, keys = unlabeled(3)
    collect(batches, lambda images, _: {"x": images}, keys, shared, "three")

    def work() -> None:
        found = collect(batches, lambda images, _: pytest.fail("computed again"), keys, shared, "three")
        assert len(found["x"].x) == 3

    assert as_another_account(work) == 0
    (shared / "made").touch()
    assert (shared / "key.safetensors").stat().st_mode == (shared / "made").stat().st_mode


@pytest.mark.parametrize("writable", [False, True])
def test_what_another_account_keeps_for_itself_ends_no_run_and_stays(writable, shared):
    batches, keys = unlabeled(3)
    collect(batches, lambda images, _: {"x": images}, keys, shared, "three")
    (shared / "key.safetensors").chmod(0o600)
    shared.chmod(0o1777 if writable else 0o755)

    def work() -> None:
        found = collect(batches, lambda images, _: {"x": images}, keys, shared, "three")
        assert torch.equal(found["x"].x, torch.ones(3, 1))

    assert as_another_account(work) == 0
    assert len(load(shared, "key").x) == 3
    assert {path.name for path in shared.iterdir()} == {"key.safetensors", ".locks"}


def test_a_disk_that_fills_up_at_the_end_leaves_nothing_unfinished(tmp_path):
    batches, keys = unlabeled(1000)

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))  # 4 bytes of each image, then 8 more of each label
        with pytest.raises(OSError, match="File too large") as error:
            collect(batches, lambda images, _: {"x": images}, keys, tmp_path, "many")
        assert error.value.filename == str(tmp_path)

    assert ended(in_a_child(work)) == 0
    assert {path.name for path in tmp_path.iterdir()} == {".locks"}


def test_activations_are_those_of_one_net_and_of_the_images_as_they_are_now(folders, tmp_path):
    """Of a net that is printed as another one, and of images of the same size and time."""
    features = {}
    for pool in ("avg", "max"):
        pair = open_pair(folders, tmp_path / "kept")
        torch.manual_seed(0)
        arguments = {"num_classes": 4, "img_size": 32, "global_pool": pool}
        _, tasks = Timm(pair, "test_vit", trainable="fold", pretrained=False, arguments=arguments).read(pair, True)
        features[pool] = tasks.harmful.train.x
    assert not torch.allclose(features["avg"], features["max"])
