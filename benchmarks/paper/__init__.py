"""The paper's experiments, one command each, on data that are here: python -m benchmarks.paper --help."""
