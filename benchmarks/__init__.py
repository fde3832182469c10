"""The benchmark suite: speed and memory against what a user would pick instead. Run `python -m benchmarks --help`.

From the bottom up:

    layer, models           what is measured: a layer and its tensors, a model and its batch
    operators, training     the peers of a layer: its operators one by one, and forward with backward
    schemes, train_step     the peers of a model: ordinary, the paper's scheme, ours; one step of its training
    speed, step, optim      suites that are timed: cases, and peers for each
    memory, peak, footprint the suite that counts bytes
    clock, measure          how calls are timed, side by side, and wrong results refused
    presets, registry, cli  what is measured by which command
    results, estimates      a file of samples; medians and their intervals
    figures, summary        what the samples say
    compare, report, readme two files side by side; a page; the README's tables
    bars                    what the kernels for CPUs and for GPUs are held to
    overhead                what a call of a small layer costs beyond torch's own: Python and dispatch
    gpu                     what `make gpu` does: steps, a smoke of every operator, a page on all
    compiled_kernels        the kernels for GPUs as they are compiled, without one, and what they should reach by that
    tune                    which of Triton's plans is the fastest for the layers that speed measures

A new kernel needs no line here: as a backend that is ready, it is measured in every case and checked against the
reference. A new shape goes into presets, a new peer into operators, training or schemes, a new model into models.
"""
