"""The pretended GPU's own rules: what CUDA refuses is refused, what it allows gives the CPU's numbers, waits count."""

import copy

import numpy as np
import pytest
import torch
from helpers.pretend_gpu import pretended_gpu
from torch import nn

pytestmark = pytest.mark.trains


@pytest.fixture
def seen():
    with pretended_gpu() as counts:
        yield counts


def test_tensors_say_where_they_are(seen):
    x = torch.arange(6.0).view(2, 3).to("cuda")
    assert x.device == torch.device("cuda", 0)
    assert x.is_cuda
    assert not x.is_cpu
    assert (x.T.device, (x + 1).device, x[0].device) == (x.device,) * 3
    assert x.cpu().device.type == "cpu"
    assert torch.zeros(2, device="cuda").is_cuda
    assert torch.zeros_like(x).is_cuda
    assert x.new_tensor([1.0]).is_cuda
    assert torch.cuda.is_available()


def test_values_are_those_of_the_cpu(seen):
    x = torch.randn(5, 3, dtype=torch.float64)
    y = x.cuda()
    for function in (torch.linalg.svdvals, lambda a: torch.linalg.qr(a).R, lambda a: a[[0, 2], 1:], lambda a: a[a > 0]):
        assert torch.equal(function(y).cpu(), function(x))
    assert torch.equal(torch.linalg.eigh(y.T @ y)[0].cpu(), torch.linalg.eigh(x.T @ x)[0])
    assert torch.cat([y, y]).sum().item() == torch.cat([x, x]).sum().item()


@pytest.mark.parametrize(
    ("mixing", "message"),
    [
        (lambda x, y: x + y, "at least two devices"),
        (lambda x, y: x @ y, "at least two devices"),
        (lambda x, y: torch.cat([x, y]), "at least two devices"),
        (lambda x, y: torch.where(y > 0, x, 0.0), "at least two devices"),
        (lambda x, y: y.add_(x), "at least two devices"),
        (lambda x, y: y.sum().add_(x.sum()), "at least two devices"),
        (lambda x, y: torch.linalg.solve(x, y), "at least two devices"),
        (lambda x, y: y[torch.tensor([0, 1]).cuda()], "indices should be either on cpu or"),
        (lambda x, y: (x > 0).long() @ (x > 0).long(), "not implemented for torch.int64"),
        (lambda x, y: x.numpy(), "can't convert cuda:0"),
        (lambda x, y: np.asarray(x), "can't convert cuda:0"),
        (lambda x, y: torch.randn(2, device="cuda", generator=torch.Generator()), "for generator"),
        (lambda x, y: nn.Linear(2, 2).cuda()(y), "at least two devices"),
    ],
)
def test_what_cuda_refuses(seen, mixing, message):
    x = torch.eye(2).cuda()
    with pytest.raises((RuntimeError, TypeError), match=message):
        mixing(x, torch.eye(2))


def test_what_cuda_allows(seen):
    x, scalar = torch.eye(2).cuda(), torch.tensor(2.0)
    chosen = torch.where(x > 0, x, scalar)
    for allowed in (x * scalar, scalar + x, x.clamp(max=scalar), chosen, x[torch.tensor([1, 0])]):
        assert allowed.is_cuda
    x[torch.tensor([0])] = 3.0
    x[0] = torch.tensor([5.0, 6.0]).cuda()
    host = torch.zeros(2, 2)
    host.copy_(x)
    assert host.tolist() == [[5.0, 6.0], [0.0, 1.0]]


@pytest.mark.parametrize(
    ("make", "options"),
    [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adam, {}), (torch.optim.Adam, {"fused": True})],
    ids=["sgd", "adam", "fused"],
)
def test_training_gives_the_numbers_of_the_cpu(seen, make, options):
    nets = [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()]
    nets.append(copy.deepcopy(nets[0]).to("cuda"))
    x = torch.randn(6, 3, dtype=torch.float64)
    for net, rows in zip(nets, (x, x.cuda()), strict=True):
        optimizer = make(net.parameters(), lr=0.1, **options)
        for _ in range(3):
            optimizer.zero_grad()
            net(rows).square().mean().backward()
            optimizer.step()
    state = {name: tensor.cpu() for name, tensor in nets[1].state_dict().items()}
    assert all(isinstance(parameter, nn.Parameter) and parameter.is_cuda for parameter in nets[1].parameters())
    for name, tensor in nets[0].state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("wait", "count"),
    [
        (lambda x: x.sum().item(), 1),
        (lambda x: bool((x > 0).any()), 1),
        (lambda x: x.cpu(), 1),
        (lambda x: x.tolist(), 1),
        (lambda x: x[x > 0], 1),
        (lambda x: x[torch.tensor([0])], 1),
        (lambda x: torch.linalg.eigh(x), 1),
        (lambda x: torch.linalg.cholesky(x), 1),
        (lambda x: torch.tensor([1.0], device="cuda"), 1),
        (lambda x: torch.ones(3).to("cuda", non_blocking=True), 0),
        (lambda x: x @ x + 2 * x.sum(), 0),
        (lambda x: torch.linalg.cholesky_ex(x), 0),
        (lambda x: torch.linalg.qr(x), 0),
        (lambda x: torch.ones(3, device="cuda").add_(1).cumsum(0), 0),
    ],
)
def test_waits_are_counted(seen, wait, count):
    x = torch.eye(3).cuda()
    seen.clear()
    wait(x)
    assert seen["waits"] == count, seen


def test_random_numbers_of_the_gpu_follow_the_seed(seen):
    torch.manual_seed(1)
    first = torch.randn(3, device="cuda")
    state = torch.cuda.get_rng_state_all()
    second = torch.randn(3, device="cuda")
    torch.cuda.set_rng_state(state[0])
    assert torch.equal(torch.randn(3, device="cuda"), second)
    torch.manual_seed(1)
    assert torch.equal(torch.randn(3, device="cuda"), first)


def test_nothing_is_left_behind():
    before = torch.cuda.is_available, torch.cuda.mem_get_info, torch.autocast, torch.Tensor.pin_memory
    with pretended_gpu():
        kept = torch.ones(2).cuda()
    assert (torch.cuda.is_available, torch.cuda.mem_get_info, torch.autocast, torch.Tensor.pin_memory) == before
    assert (kept + 1).cpu().tolist() == [2.0, 2.0]
