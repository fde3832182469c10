"""What `make gpu` does in the ten minutes that one may have on a machine with a GPU.

    steps       what runs, in which order, and for how long; ends it in time, and keeps what it said
    summary     the page on top of it all
    cases       small calls of every operator, each with its truth
    smoke       runs these on every backend, each where it can lose no other

Nothing imports PyTorch but cases and smoke: whatever hangs or dies does so in a process of its own.
"""
