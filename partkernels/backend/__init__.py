"""The backends, one folder each, and the dispatch that chooses among them.

Each folder's __init__ defines BACKEND, which is imported at once. Its module `operators` has a function for each
operator (see partkernels.operators) and is imported on first use. Backends are listed nowhere else.
"""
