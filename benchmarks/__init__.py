"""The benchmark suite: speed and memory against what a user would pick instead. Run `python -m benchmarks --help`.

    peers       what is measured, and against what: a layer and its tensors, models, and the ways to write them
    suites      speed, step and optim, which are timed, and memory, which counts bytes
    measuring   clocks, peers that take turns, wrong results refused, peaks of memory, the machine, intervals
    presets, cli            what is measured by which command
    results     a file of samples (the module), and what was measured with it (the folder)
    figures, summary        what samples say, as pandas' tables
    compare, report         two files side by side; a page; the tables of docs/benchmarks.md
    bars        what the kernels for CPUs and for GPUs are held to
    overhead    what a call of a small layer costs beyond torch's own: Python and dispatch
    tune        which of Triton's plans is the fastest for the layers that speed measures
    gpu         what `make gpu` does: steps, a smoke of every operator, a page on all
    compiled_kernels        the kernels for GPUs as they are compiled, without one
    paper       the paper's experiments

A new kernel needs no line here: as a backend that is ready, it is measured in every case and checked against the
reference. A new shape goes into presets, a new peer into peers.operators, training or schemes, a new model into
peers.models.
"""
