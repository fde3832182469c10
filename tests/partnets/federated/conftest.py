import importlib.util

# Do not collect the Flower app, which runs in separate processes, nor files that import Flower if it is missing.
collect_ignore = ["flower_project"]
if not importlib.util.find_spec("flwr"):
    collect_ignore += ["nodes.py"]
