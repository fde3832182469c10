"""A Sphinx extension that writes the pages of the API reference into docs/api before each build."""

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

from sphinx.ext import autosummary
from sphinx.ext.autodoc.mock import mock

FOLDER = Path(__file__).parent / "api"
# Public names are those of __all__ unless they are given here. A name of several modules is documented in the first.
MODULES = {
    "partnets.nn": "",
    "partnets": "",
    "partnets.hyper": "",
    "partnets.data": "",
    "partnets.optim": "",
    "partnets.training": "",
    "partnets.training.callbacks": "every Callback",
    "partnets.training.loggers": "CSV Scalars TensorBoard",
    "partnets.stn": "",
    "partnets.federated": "",
    "partnets.federated.flower": "",
    "partnets.distributed": "",
    "partnets.integrations.lightning": "PartitionedModule",
    "partnets.integrations.hugging_face": "PartitionedTrainer",
    "partnets.subnetworks.parameters": "PartitionedParameter partitioned_parameters",
    "partnets.subnetworks.state": "PartitionState num_partitions partitioned_modules state_of",
    "partkernels": "",
    "partkernels.partition": "Partition NestedPartition sizes",
    "partkernels.defaults": "Defaults Zeros Uniform Normal Stored check_seed",
    "partkernels.backend.plan": "Config use_plan",
    "partkernels.backend.triton.operators": "Config tuning use_plan",
    "partkernels.testing": "Yardstick poisoned_memory",
    "partkernels_numpy": "",
}


def write_pages(app) -> None:
    """Write a page for each module: its docstring, a table of its names, and their docstrings."""
    FOLDER.mkdir(exist_ok=True)
    homes: dict[int, str] = {}
    for module_name, names in MODULES.items():
        with mock(app.config.autodoc_mock_imports):
            module = importlib.import_module(module_name)
        table, entries = [], []
        for name in names.split() or module.__all__:
            member, path = getattr(module, name), f"{module_name}.{name}"
            kind = "class" if inspect.isclass(member) else "function" if inspect.isroutine(member) else "data"
            home = member.__name__ if isinstance(member, ModuleType) else homes.setdefault(id(member), path)
            if home != path:
                entries.append(f".. py:{kind}:: {name}\n\n   The same as :py:obj:`{home}`.\n")
            elif name == "__version__":
                entries.append(f".. py:data:: {name}\n   :value: {member!r}\n")
            elif not isinstance(member, ModuleType):
                table.append(name)
                options = {"class": "   :members:\n", "data": "   :no-value:\n"}
                entries.append(f".. auto{kind}:: {path}\n{options.get(kind, '')}")
        title = f"{module_name}\n{'=' * len(module_name)}\n"
        listed = "\n   ".join([".. autosummary::", ":nosignatures:", "", *table])
        page = [title, f".. automodule:: {module_name}\n   :no-members:\n", listed, "", *entries]
        (FOLDER / f"{module_name}.rst").write_text("\n".join(page))


def to_restructured_text(app, what, name, object, options, lines) -> None:
    """Show indented blocks of a module's docstring as code; elsewhere, leave stars as they are, and returns untyped."""
    for i in range(len(lines) - 1, 0, -1):
        if lines[i - 1].strip() in ("Returns:", "Yields:"):
            lines[i] = re.sub(r"^( *)", r"\1: ", lines[i])  # or napoleon takes text before a colon for a type
        if what != "module" and not lines[i].lstrip().startswith((">>>", "...")):
            lines[i] = re.sub(r"\*(?=[*\w])", r"\\*", lines[i])
        elif what == "module" and lines[i].startswith("    ") and not lines[i - 1]:
            lines[i - 1 : i] = ["", "::", ""]


def setup(app) -> dict[str, bool]:
    autosummary.WELL_KNOWN_ABBREVIATIONS += ("Eq.",)  # after which a summary continues
    app.connect("builder-inited", write_pages)
    app.connect("autodoc-process-docstring", to_restructured_text, priority=400)  # before napoleon's
    return {"parallel_read_safe": True}
