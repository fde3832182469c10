import importlib.util

# A Flower app, that processes of its own run; and what imports Flower, where Python is older than 3.11.
collect_ignore = ["flower_project"]
if not importlib.util.find_spec("flwr"):
    collect_ignore += ["nodes.py"]
