"""Gradients by backpropagation through plain formulas, to compare with those computed by hand."""

import math

import torch


def gradient(function, *inputs):
    """Gradients of a scalar function with respect to all inputs."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    return torch.autograd.grad(function(*leaves), leaves)


def r_well_by_autograd(s, rank=None, power=math.inf):
    sigma = torch.linalg.svdvals(s)[: rank or min(s.shape)]
    mean = sigma[0] if power == math.inf else sigma.pow(power).mean() ** (1 / power)
    return mean**2 / 2 - sigma.square().sum() / (2 * (rank or min(s.shape)))


def log_kappa_by_autograd(s, rank, power):
    sigma = torch.linalg.svdvals(s)[:rank]
    if power == math.inf:
        return 2 * (sigma[0] / sigma[-1]).log()
    return (sigma.pow(2 * power).mean().log() + sigma.pow(-2 * power).mean().log()) / power


def r_ill_by_autograd(s, rank):
    sigma = torch.linalg.svdvals(s)
    return 1 / (sigma.square().sum() / (2 * rank) - sigma[rank - 1] ** 2 / 2)
