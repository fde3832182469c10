#!/bin/sh
# Trains the paper's image classifiers on a GPU, the most informative first. Not yet run on a GPU.
#
#     PARTNETS_DATA=data sh benchmarks/partbench/paper/gpu.sh out
#
# In bfloat16, which costs no accuracy (1,250 rotated MNIST images on a CPU: 80.6 and 93.6 %, not 79.9 and 93.5).
# An interrupted training resumes from its last checkpoint, up to 500 steps before, if the folder out is kept.
set -e
out=$1
train() {
    dataset=$1 examples=$2 rotated=$3 method=$4
    python3 -m partbench.paper augmentation --dataset "$dataset" --seeds 0 --device cuda --bfloat16 --out "$out" \
        --only "examples=$examples" --only "rotated=$rotated" --only "method=$method"
}
train cifar10 5000 True partitioned
train cifar10 5000 True standard
train mnist 60000 True partitioned
train mnist 60000 True standard
train cifar10 50000 True partitioned # the first row of Table 1
train cifar10 50000 True standard
python3 -m partbench.paper augmentation --dataset cifar10 --seeds 0 --bfloat16 --out "$out" --finished
python3 -m partbench.paper augmentation --dataset mnist --seeds 0 --bfloat16 --out "$out" --finished
