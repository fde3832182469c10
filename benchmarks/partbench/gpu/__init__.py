"""Everything that `make gpu` does, within the ten minutes for which a machine with a GPU may be available.

    steps       the steps, their order and their time limits; ends each in time and keeps its output
    summary     the summary page
    cases       small calls of every operator, each with its reference result
    smoke       runs these calls on every backend, isolated from one another

Only cases and smoke import PyTorch: anything that can hang or crash runs in a separate process.
"""
