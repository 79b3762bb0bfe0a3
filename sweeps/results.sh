#!/bin/sh
# The multiruns behind RESULTS.md and docs/results, then these pages: make results, or sh sweeps/results.sh [SECTION...].
# A SECTION is what precedes the slash below. Completed jobs are kept: stop and start it at any time. QUICK=1 makes
# a small form of some of them, in minutes, and a report instead of the pages.
# Data are in the cache, or downloaded into it; HOUSE_PRICES and MNIST name folders of your own (of train.csv, and of
# MNIST/raw). The nets read images and weights from IMMUNIZATION_DATA_ROOT (docs/install.md).
set -f # evaluation=[...] names no files
cd "$(dirname "$0")/.." || exit
sections=" $* " failed= begun= PYTHON=${PYTHON:-python}
trap 'exit 130' INT

run() { # <section>/<multirun> <override>...
    name=$1
    shift
    case $sections in "  " | *" ${name%/*} "*) ;; *) return ;; esac
    begun=yes
    echo "$name"
    "$PYTHON" launch.py -m "$@" launcher=joblib tracker=none figures=false resume=true "hydra.sweep.dir=$RUNS/$name" ||
        failed="$failed $name"
}

houses=${HOUSE_PRICES:+dataset.root=$HOUSE_PRICES}
mnist=${MNIST:+dataset.root=$MNIST}
two="method=r_ill_only,condition_number"

if [ "$QUICK" ]; then
    RUNS=${RUNS:-outputs/results_quick}
    run digits/table2 experiment=table2 pair=0-1,3-5,7-2 seed=0 $two method.epochs=5
    run house_prices/table1 experiment=table1 seed=0 $two method.epochs=5 $houses
    run house_prices_stated/table1 experiment=paper/table1 seed=0 $two method.epochs=5 $houses
    run mnist_stated/seed0 experiment=paper/table2 pair=0-1 $two seed=0 method.epochs=1 dataset.max_samples=100 $mnist
else
    RUNS=${RUNS:-outputs/results}
    run digits/table2 experiment=table2
    run house_prices/table1 experiment=table1 $houses
    run house_prices_stated/table1 experiment=paper/table1 $houses
    run house_prices_closest/table1 experiment=paper/table1_closest $houses
    run house_prices_released/house_prices experiment=released/house_prices seed=0,1,2 $houses

    ten=pair=0-1,1-2,2-3,3-4,4-5,5-6,6-7,7-8,8-9,9-0
    run mnist_stated/seed0 experiment=paper/table2 $ten method=r_ill_only,imma,opt_kappa,condition_number seed=0 $mnist
    run mnist_stated/seeds12 experiment=paper/table2 $ten method=opt_kappa,condition_number seed=1,2 $mnist
    run mnist_closest/seeds experiment=paper/table2_closest method=opt_kappa,released_condition_number $mnist
    run mnist_closest/seed0 experiment=paper/table2_closest method=r_ill_only,imma seed=0 $mnist

    # Table 4's weights: at its rate, 1e-5, the first step switches every feature of ResNet18 off, at 1e-7 it diverges.
    # R_ill's rate on ViT-Tiny is Table 4's rate times its lambda_H for ViT-B/16.
    measures="evaluation=[rir,definition,primary,ceiling,learning_curves,own_head,validity]"
    nesterov=optimizer=nesterov stated="method.balance=false method.power=inf"
    net="experiment=resnet18_cars_small $measures"
    run resnet18/table4_rates $net method=imma,condition_number $nesterov seed=0,1,2
    run resnet18/r_ill_only $net method=r_ill_only $nesterov optimizer.lr=20 seed=0,1,2
    run resnet18/opt_kappa $net method=opt_kappa method.form=log $nesterov optimizer.lr=1e-4 seed=0,1,2
    run resnet18/table4_lambdas $net method=condition_number $nesterov optimizer.lr=1e-8 seed=0 $stated \
        method.lambda_P=5e-5 method.lambda_H=2e6
    run resnet18/maps $net method=closed_form,learning_curve seed=0
    net="experiment=vit_cars_small $measures"
    run vit_tiny/table4_rates $net method=imma,condition_number $nesterov seed=0,1,2
    run vit_tiny/r_ill_only $net method=r_ill_only $nesterov optimizer.lr=3000 seed=0,1,2
    run vit_tiny/opt_kappa $net method=opt_kappa method.form=log $nesterov optimizer.lr=1e-4 seed=0,1,2
    run vit_tiny/table4_lambdas $net method=condition_number $nesterov seed=0 $stated method.lambda_P=3e-6 \
        method.lambda_H=3e8 method.epochs=2
    run vit_tiny/maps $net method=closed_form,learning_curve seed=0
fi

if [ ! "$begun" ]; then
    echo "error: no section $*; sections are the names before a slash in sweeps/results.sh" >&2
    exit 1
fi
if [ "$QUICK" ]; then
    "$PYTHON" -m immunization.results "$RUNS" --output "$RUNS/report" || exit
else
    "$PYTHON" -m immunization.results pages --runs "$RUNS" || exit
fi
if [ "$failed" ]; then
    echo "not all jobs are completed:$failed; the same command goes on" >&2
    exit 1
fi
