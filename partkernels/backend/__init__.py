"""The backends, a folder each, which says all about itself, and what chooses among them.

A folder has in its __init__ a BACKEND, which is read at once, and a module `operators`, which is read when it is first
used, with a function for each operator: see partkernels.operators. Nothing else lists the backends.
"""
