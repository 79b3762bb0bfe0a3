"""Keys of what is kept: each part counts by its content, and nothing that a value depends on is left out."""

import importlib
import os
import sys
from pathlib import Path

import pytest
import timm
import torch
from torch import nn

from immunization.compute import keys


def test_equal_content_has_one_key_and_every_part_counts():
    parts = {"a": torch.arange(4), "b": {"x": 1, "y": None}, "c": ["text", 2.0, torch.float32]}
    assert keys.key(**parts) == keys.key(**(parts | {"a": torch.arange(8)[::2] // 2, "b": {"y": None, "x": 1}}))
    others = [{"a": torch.arange(4.0)}, {"a": torch.arange(4).view(2, 2)}, {"b": {"x": 1}}, {"c": ["text2.0", 2.0]}]
    others += [{"c": ["text", "2.0", torch.float32]}, {"c": [["text"], 2.0, torch.float32]}]
    assert len({keys.key(**(parts | other)) for other in [{}, *others]}) == 1 + len(others)
    with pytest.raises(TypeError, match="no key is made of a object"):
        keys.key(a=object())


def rewritten(path: Path, content: bytes) -> None:
    """Other bytes of the same size and time under the same name, as rsync and tar leave them."""
    status = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)


def test_files_count_by_their_bytes_and_not_by_name_or_time(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(b"x" * 100)
    two.write_bytes(b"y" * 100)
    first = keys.content([one, two])
    assert keys.content([two, one]) != first
    rewritten(two, b"z" * 100)
    changed = keys.content([one, two])
    rewritten(two, b"y" * 100)
    two.rename(tmp_path / "three")
    assert keys.content([one, tmp_path / "three"]) == first != changed
    assert keys.content([one, two]) != first  # is not there, which the one who reads it says


def test_of_a_large_file_blocks_are_read_from_its_first_to_its_last(tmp_path, monkeypatch):
    monkeypatch.setattr(keys, "SHARE", 4 * keys.BLOCK)
    path, size = tmp_path / "large", 100 * keys.BLOCK
    path.write_bytes(bytes(size))
    seen = {keys.content([path])}
    for place in (0, 33 * keys.BLOCK + 1, size - 1):
        rewritten(path, bytes(place) + b"1" + bytes(size - place - 1))
        seen.add(keys.content([path]))
    assert len(seen) == 4
    path.write_bytes(bytes(size + 1))
    assert keys.content([path]) not in seen


def net_key(net: nn.Module) -> str:
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return keys.net([net], lambda x: net.forward_head(net.forward_features(x), pre_logits=True), images)


def test_a_net_that_is_printed_as_another_one_has_a_key_of_its_own():
    nets = {}
    for pool in ("avg", "max"):
        torch.manual_seed(0)
        nets[pool] = timm.create_model("test_vit", num_classes=4, img_size=32, global_pool=pool).eval()
    assert str(nets["avg"]) == str(nets["max"])
    assert all(map(torch.equal, nets["avg"].state_dict().values(), nets["max"].state_dict().values()))
    before = torch.get_rng_state()
    assert net_key(nets["avg"]) == net_key(nets["avg"]) != net_key(nets["max"])
    assert torch.equal(torch.get_rng_state(), before)


ATTACK = "from {helper} import rate\n\nclass Mine:\n    # {comment}\n    def rate(self):\n        return rate\n"


def test_code_of_ones_own_counts_with_what_it_imports_and_without_comments(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))

    def digest(rate: int, comment: str) -> tuple[str, ...]:
        (tmp_path / "own_rate.py").write_text(f"rate = {rate}\n")
        (tmp_path / "own_attack.py").write_text(ATTACK.format(helper="own_rate", comment=comment))
        for name in ("own_rate", "own_attack"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        return keys.code(importlib.import_module("own_attack").Mine)

    first = digest(1, "a comment")
    assert [line.split()[0] for line in first] == ["own_attack", "own_rate"]
    assert digest(1, "another one") == first
    assert [line in first for line in digest(2, "a comment")] == [True, False]
    assert keys.code(nn.Linear, type("Made", (nn.Linear,), {"__module__": "torch.made"})) == ()


def test_versions_name_all_that_prepares_or_computes():
    named = {line.split()[0] for line in keys.versions()}
    assert {"torch", "timm", "torchvision", "pillow", "numpy"} <= named
    assert not any(line.endswith(" None") for line in keys.versions() if line.split()[0] in ("torch", "pillow"))


@pytest.mark.parametrize("changed", ["torchvision", "pillow"])
def test_another_version_is_another_machine(changed, monkeypatch):
    from immunization.runs import environment

    before = environment.arithmetic(torch.device("cpu"))
    real = keys.version_of
    monkeypatch.setattr(keys, "version_of", lambda name: "0.0" if name == changed else real(name))
    assert environment.arithmetic(torch.device("cpu")) != before
