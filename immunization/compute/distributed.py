"""Training of one net by several processes (torchrun). Each computes the features of its share of a batch.

The shares are gathered before any method or head sees them; backward, every process sends the gradient of its own rows
through the net, and the optimizer gets the sums over all. With one process, every function here does nothing.
"""

import math
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.autograd.function import once_differentiable

from immunization.errors import DegenerateSpectrum, OtherEnded
from immunization.theory import spectrum

PATIENCE = timedelta(days=1)  # longest wait for another process, which may be computing the activations of a large set


def size() -> int:
    """Number of processes that train together, 1 outside of `group`."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def rank() -> int:
    """Number of this process; the one with 0 writes files."""
    return distributed.get_rank() if distributed.is_initialized() else 0


def own_gpu() -> torch.device:
    """The GPU of this process: that of its number on this machine, or the only one that a launcher lets it see."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())


@contextmanager
def group(device: str) -> Iterator[None]:
    """Join the processes that torchrun has started, if it has; nccl between GPUs, gloo between CPUs.

    Where another process ends, this one says so and leaves by SystemExit: torchrun is about to kill it.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) < 2 or distributed.is_initialized():
        yield
        return
    if device != "cpu" and torch.cuda.is_available():
        torch.cuda.set_device(own_gpu())  # first, or every process would open a context on GPU 0
        distributed.init_process_group("nccl", timeout=PATIENCE, device_id=own_gpu())
    else:
        distributed.init_process_group("gloo", timeout=PATIENCE)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before if rank() else ():  # the first process decides when to stop: it has the checkpoint to write
        signal.signal(number, signal.SIG_IGN)
    try:
        yield
    except OtherEnded as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        leave()


def _together(collective: Callable[..., object], *arguments: object, **options: object) -> None:
    """Call a function that all processes call. Raises OtherEnded where one of them does not answer any more."""
    try:
        collective(*arguments, **options)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # of sockets or of a GPU's library, in words of its own
        raise OtherEnded(
            f"another process of this training ended, or cannot be reached (this is process {rank()} of {size()}; what "
            "the other one said tells why); resume=true goes on from the last checkpoint"
        ) from error


def _device() -> torch.device:
    return own_gpu() if distributed.get_backend() == "nccl" else torch.device("cpu")


def leave() -> None:
    if distributed.is_initialized():
        distributed.destroy_process_group()


def agree(folder: Path | None = None) -> Path | None:
    """The folder that the first process gives, absolute, on every process; None if it gives none."""
    if size() == 1:
        return folder
    answer = [folder and folder.resolve()]
    _together(distributed.broadcast_object_list, answer, src=0, device=_device())
    return answer[0]


@contextmanager
def main_process_first() -> Iterator[None]:
    """The first process goes ahead; the others follow when it is done, and find the files that it wrote."""
    if size() > 1 and rank():
        _together(distributed.barrier)
    yield
    if size() > 1 and not rank():
        _together(distributed.barrier)


def share(rows: Tensor) -> Tensor:
    """The rows of a batch that this process computes: the n-th of `size` parts that differ by at most one row."""
    return rows if size() == 1 else rows.tensor_split(size())[rank()]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part: Tensor) -> Tensor:
        counts = torch.zeros(size(), dtype=torch.long, device=part.device)
        counts[rank()] = len(part)
        _together(distributed.all_reduce, counts)
        counts = counts.tolist()
        padded = part.new_zeros(max(counts), *part.shape[1:])
        padded[: len(part)] = part
        parts = [torch.empty_like(padded) for _ in counts]
        _together(distributed.all_gather, parts, padded)
        ctx.start, ctx.count = sum(counts[: rank()]), len(part)
        return torch.cat([one[:count] for one, count in zip(parts, counts, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor) -> Tensor:
        return upstream[ctx.start : ctx.start + ctx.count]


def gather(part: Tensor) -> Tensor:
    """The rows of all processes, in order, on each of them; backward, a process gets the gradient of its own rows."""
    return part if size() == 1 else _Gather.apply(part)


def attach(extractor: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Let `extractor` give features of the whole batch where gradients are recorded, and sum these in each step."""
    if size() == 1:
        return
    extractor.register_forward_hook(lambda _m, _i, features: gather(features) if torch.is_grad_enabled() else features)
    theta = [p for p in extractor.parameters() if p.requires_grad]

    def total(*_: object) -> None:
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in theta]
        for p, gradient in zip(theta, summed(gradients), strict=True):
            p.grad = gradient

    optimizer.register_step_pre_hook(total)


def summed(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors, each summed over all processes."""
    if size() == 1 or not tensors:
        return tensors
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    _together(distributed.all_reduce, flat)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def triangular_factor(batches: Iterable[Tensor], width: int) -> Tensor:
    """R [min(N, D), D] in float64 of all rows of all processes, each giving its own batches [n, D] (TSQR)."""
    if size() == 1:
        return spectrum.triangular_factor(batches)[0]
    own = torch.zeros(width, width, dtype=torch.float64, device=_device())
    batches = iter(batches)
    if (first := next(batches, None)) is not None:
        try:
            factor = spectrum.triangular_factor(chain([first], batches))[0]
            own[: len(factor)] = factor
        except DegenerateSpectrum:  # NaN lets every process raise it, in the last line
            own.fill_(math.nan)
    factors = [torch.empty_like(own) for _ in range(size())]
    _together(distributed.all_gather, factors, own)
    return spectrum.triangular_factor(torch.cat(factors))[0]
