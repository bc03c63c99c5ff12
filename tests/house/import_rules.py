"""Who may import whom: one table, and a reader of the imports of a source file."""

import ast
import dataclasses
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "keras_diffusion_opd"

# From the top down. A file may import from its own folder and from folders on lines further down;
# folders on one line never meet.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("__main__",),
    ("cli",),
    ("demos",),
    ("workflows",),
    ("serving", "trainers", "callbacks"),
    ("distribution",),
    ("rewards",),
    ("adapters",),
    ("samplers",),
    ("models",),
    ("layers",),
    ("metrics",),
    ("losses",),
    ("data",),
    ("schedules",),
    ("provenance",),
    ("testing",),
    ("validation",),
    ("counter_random",),
    ("backend",),
    ("version",),
)
RANK = {folder: rank for rank, line in enumerate(LAYERS) for folder in line}

# The files that may use keras.src, each with the reason. None does.
KERAS_SRC_ALLOWED: dict[str, str] = {}

# The only files that may import a backend.
BACKEND_FILES = {"jax": "_jax.py", "tensorflow": "_tensorflow.py", "torch": "_torch.py"}

# Folders that must work where nothing but these is installed.
FRUGAL = {"provenance": {"numpy"}, "cli": set(), "__main__": set(), "version": set()}

# Distributions whose import name is not their own name with underscores.
DISTRIBUTIONS = {"sklearn": "scikit-learn", "orbax": "orbax-checkpoint"}


@dataclasses.dataclass(frozen=True)
class Import:
    """One imported module: `when` is "import" (runs with the file), "call" (in a function) or "typing"."""

    module: str
    line: int
    when: str


class _Reader(ast.NodeVisitor):
    def __init__(self, module: str, is_package: bool) -> None:
        parts = module.split(".")
        self.parents = parts if is_package else parts[:-1]
        self.when = "import"
        self.found: list[Import] = []

    def _add(self, module: str, node: ast.AST) -> None:
        self.found.append(Import(module, getattr(node, "lineno", 0), self.when))

    def _within(self, when: str, nodes: list[ast.stmt]) -> None:
        before, self.when = self.when, when
        for node in nodes:
            self.visit(node)
        self.when = before

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = ".".join(self.parents[: len(self.parents) - node.level + 1]) if node.level else ""
        module = ".".join(part for part in (base, node.module) if part)
        for alias in node.names:
            # `from keras import src` and `from keras_diffusion_opd import data` name modules.
            is_module = module in ("keras", PACKAGE) and alias.name != "__version__"
            self._add(f"{module}.{alias.name}" if is_module else module, node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._within(self.when if self.when == "typing" else "call", node.body)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_If(self, node: ast.If) -> None:
        typing_only = ast.unparse(node.test).split(".")[-1] == "TYPE_CHECKING"
        self._within("typing" if typing_only else self.when, node.body)
        self._within(self.when, node.orelse)

    def visit_Call(self, node: ast.Call) -> None:
        name = ast.unparse(node.func).split(".")[-1]
        if name in ("import_module", "__import__") and node.args and isinstance(node.args[0], ast.Constant):
            self._add(str(node.args[0].value), node)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr == "src" and isinstance(node.value, ast.Name) and node.value.id == "keras":
            self._add("keras.src", node)
        self.generic_visit(node)


def imports_of(source: str, module: str, *, is_package: bool = False) -> list[Import]:
    """The imports of `source`, which is the module `module`, with relative ones made absolute."""
    reader = _Reader(module, is_package)
    reader.visit(ast.parse(source))
    return reader.found


def declared(root: Path = ROOT) -> tuple[set[str], set[str]]:
    """The distributions that pyproject.toml requires: (always, with some extra)."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]

    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[^A-Za-z0-9_.-]", r, maxsplit=1)[0].lower() for r in requirements}

    extras = project["optional-dependencies"].values()
    return names(project["dependencies"]), names([r for extra in extras for r in extra])


def _inside(file: str, folder: str, item: Import) -> Iterator[str]:
    """The direction of an import from within the package."""
    parts = item.module.split(".")
    if len(parts) == 1:
        if folder != "__init__":
            yield "imports the whole package: name the folder"
        return
    target = parts[1]
    if target not in RANK:
        yield f"imports {target}, which the table LAYERS does not know: give it a line"
    elif folder == "__init__":
        if item.when == "import" and target != "version":
            yield f"imports {target} at once: the root imports its folders when they are first named"
    elif target != folder and RANK[target] <= RANK[folder]:
        where = "beside" if RANK[target] == RANK[folder] else "above"
        yield f"imports {target}, which lies {where} {folder}"


def _outside(file: str, folder: str, item: Import) -> Iterator[str]:
    """What may be imported from other packages, and when."""
    top = item.module.split(".")[0]
    if item.module == "keras.src" or item.module.startswith("keras.src."):
        if file not in KERAS_SRC_ALLOWED:
            yield "uses keras.src, which changes without notice: use the public API"
    elif top in sys.stdlib_module_names:
        return
    core, extras = declared()
    distribution = DISTRIBUTIONS.get(top, top.replace("_", "-"))
    if top in BACKEND_FILES:
        if Path(file).name != BACKEND_FILES[top]:
            yield f"imports {top}: only files called {BACKEND_FILES[top]} may"
    elif distribution not in core | extras:
        yield f"imports {top}, which pyproject.toml does not declare"
    elif item.when == "import" and distribution not in core:
        yield f"imports {top} at module level, but it is optional: import it where it is used"
    # The command line may reach for anything, but only inside the command that needs it.
    must_hold = folder == "provenance" or (item.when == "import" and top not in BACKEND_FILES)
    if folder in FRUGAL and must_hold and item.when != "typing" and top not in FRUGAL[folder]:
        allowed = " and ".join(["the standard library", *FRUGAL[folder]])
        yield f"imports {top}: {folder} must start with {allowed}"


def violations(file: str, source: str) -> list[str]:
    """Every rule that the file at `file` (relative to the repository) breaks, as `file:line message`."""
    parts = Path(file).with_suffix("").parts
    folder = parts[1]
    is_package = parts[-1] == "__init__"
    module = ".".join(parts[:-1] if is_package else parts)
    if folder not in RANK and folder != "__init__":
        return [f"{file}: the folder {folder} has no line in the table LAYERS"]
    found = []
    for item in imports_of(source, module, is_package=is_package):
        check = _inside if item.module.split(".")[0] == PACKAGE else _outside
        found += [f"{file}:{item.line} {message}" for message in check(file, folder, item)]
    return found


def package_files(root: Path = ROOT) -> list[Path]:
    """Every source file of the package."""
    return sorted((root / PACKAGE).rglob("*.py"))
