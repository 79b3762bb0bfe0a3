"""Costs of immunizing deep nets, against what has to be paid anyway: `python benchmarks/deep.py [--device cuda]`.

1. A step of condition_number against a plain supervised step on the same two batches (at most 1.25).
2. Exact kappa over a data set against feature extraction alone (at most 1.1).
3. Samples a second of each method, and of condition_number with the options of the model that are given.

Random images and weights; medians of `--repeats` interleaved measurements, on a CPU of the process's own CPU time (all
threads), which other processes disturb little.
"""

from __future__ import annotations

import argparse

import torch
from clock import seconds
from nets import NetSteps, condition_number

from immunization.methods import IMMA, LearningCurveNet, OptKappa, RIllOnly
from immunization.theory import spectrum

OPTIONS = ("channels_last", "amp")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--trainable", default="layer4")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--batches", type=int, default=8, help="batches of the data set whose kappa is taken")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=5)
    for name in OPTIONS:
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", help="in a row of its own")
    args = parser.parse_args()
    cuda = args.device == "cuda"

    dtype = getattr(torch, args.dtype)
    steps = NetSteps(args.model, args.trainable, args.size, args.batch, args.batches, args.device, dtype)
    model, x, n = steps.model, steps.x, args.batch * args.batches
    methods = {
        "condition_number": condition_number(args.batch),
        "r_ill_only": RIllOnly(epochs=1, batch_size=args.batch),
        "opt_kappa": OptKappa(epochs=1, batch_size=args.batch, form="log"),
        "imma": IMMA(epochs=1, batch_size=args.batch),
        "learning_curve_net": LearningCurveNet(epochs=1, batch_size=args.batch),
    }
    rows = {name: steps.step(method) for name, method in methods.items()}
    if chosen := [name for name in OPTIONS if getattr(args, name)]:

        def hasty() -> None:
            model.channels_last, model.amp = ("channels_last" in chosen, "amp" in chosen)
            rows["condition_number"]()
            model.channels_last = model.amp = False

        rows |= {"+".join(chosen): hasty}
    timing = {"repeats": args.repeats, "cuda": cuda}
    plain, *times = seconds(steps.supervised, *rows.values(), **timing)
    print(f"{args.model}, {args.trainable}, batches of {args.batch}, {args.dtype}, {args.device}", flush=True)
    print(f"plain supervised step    {plain:8.3f} s")
    for name, value in zip(rows, times, strict=True):
        print(f"{name:24} {value:8.3f} s  {value / plain:5.2f} x  {2 * args.batch / value:8.0f} images/s")

    def extract() -> None:
        for _ in model.feature_batches(x):
            pass

    def kappa() -> None:
        spectrum.condition_number(model.feature_batches(x))

    forward, exact = seconds(extract, kappa, **timing)
    print(
        f"features of {n} images   {forward:8.3f} s\nexact kappa of the same {exact:8.3f} s  {exact / forward:5.2f} x"
    )


if __name__ == "__main__":
    main()
