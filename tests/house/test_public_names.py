"""Every public name is where the design says, is documented, and its examples run."""

import abc
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import keras_diffusion_opd as kdo
from tests.house.import_rules import PACKAGE, ROOT
from tests.house.name_rules import arguments_of, examples_of, faults, mentions, run_example

# Folders without public names, each with the reason.
INTERNAL = {
    "backend": "what keras.ops cannot say; the other folders use it",
    "cli": "its interface is the command kdo",
    "demos": "run by kdo demo",
}
FOLDERS = sorted(path.parent.name for path in (ROOT / PACKAGE).glob("*/__init__.py"))
PUBLIC = [folder for folder in FOLDERS if folder not in INTERNAL]
NAMES = [(folder, name) for folder in PUBLIC for name in getattr(getattr(kdo, folder), "__all__", ())]
IDS = [f"{folder}.{name}" for folder, name in NAMES]


@pytest.mark.parametrize("folder", PUBLIC)
def test_folder_is_public_and_lists_its_names(folder: str) -> None:
    module = getattr(kdo, folder)
    assert module.__name__ == f"{PACKAGE}.{folder}"
    if any((ROOT / PACKAGE / folder).rglob("[!_]*.py")):
        assert len(module.__doc__ or "") > 20, f"{folder}/__init__.py needs a docstring"
        names = getattr(module, "__all__", None)
        assert names, f"{folder}/__init__.py needs __all__"
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("folder", PUBLIC)
def test_folder_exports_nothing_that_all_does_not_list(folder: str) -> None:
    module = getattr(kdo, folder)
    ours = {name for name, x in vars(module).items() if str(getattr(x, "__module__", "")).startswith(PACKAGE)}
    visible = {name for name in ours if not name.startswith("_")}
    assert visible <= set(getattr(module, "__all__", ()))


@pytest.mark.parametrize(("folder", "name"), NAMES, ids=IDS)
def test_name_is_documented(folder: str, name: str) -> None:
    found = faults(f"{folder}.{name}", getattr(getattr(kdo, folder), name))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("folder", "name"), NAMES, ids=IDS)
def test_examples_run(folder: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    value = getattr(getattr(kdo, folder), name)
    if inspect.isclass(value) or inspect.isroutine(value):
        for code in examples_of(inspect.getdoc(value) or ""):
            run_example(code, f"{folder}.{name}")


def test_unknown_folder_is_refused_with_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'loses'.*losses"):
        _ = kdo.loses


# Negative controls: the rules above find what they are there to find.


def _good(values: Any, *, axis: int = 0) -> Any:
    """Sum of values.

    Args:
        values: float (n,), the terms.
        axis: where to sum.

    Returns:
        The sum.

    Example:
        >>> 1 + 1
        2
    """
    return np.sum(values, axis)


def _documented_as(doc: str) -> Callable[..., Any]:
    def function(values: Any, *, axis: int = 0) -> Any:
        return np.sum(values, axis)

    function.__doc__ = doc
    return function


class _Unregistered(keras.losses.Loss):
    """A loss that was never registered.

    Example:
        >>> 1 + 1
        2
    """

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return y_pred


def test_rules_let_a_good_function_pass() -> None:
    assert faults("f", _good) == []


@pytest.mark.parametrize(
    ("doc", "phrase"),
    [
        ("", "no docstring"),
        (_good.__doc__.replace("Args:", "Input:"), "no `Args:`"),
        (_good.__doc__.replace("axis: where", "where"), "does not document `axis`"),
        (_good.__doc__.replace("Returns:", "Gives:"), "no `Returns:`"),
        (_good.__doc__.replace(">>> 1 + 1\n", ""), "has no example"),
    ],
)
def test_rules_find_a_missing_part(doc: str, phrase: str) -> None:
    found = faults("f", _documented_as(doc))
    assert any(phrase in fault for fault in found), found


def test_rules_find_an_unregistered_class() -> None:
    found = faults("Loss", _Unregistered)
    assert len(found) == 1 and "not registered" in found[0]


def test_errors_and_abstract_classes_need_no_example() -> None:
    class OwnError(ValueError):
        """What went wrong, in so many words."""

    class Base(abc.ABC):
        """What every kind of thing can do."""

        @abc.abstractmethod
        def do(self) -> None: ...

    class Thing(Base):
        """One kind of thing, which does it."""

        def do(self) -> None: ...

    assert faults("OwnError", OwnError) == faults("Base", Base) == []
    assert len(faults("Thing", Thing)) == 1


def test_inherited_arguments_of_keras_need_no_words() -> None:
    assert arguments_of(_Unregistered) == []


@pytest.mark.parametrize(
    "doc",
    [
        "axis: where",
        "    axis: int, where",
        "values, axis: both",
        "uses `axis` so",
        "`axis=1`",
        "axis (int): y",
    ],
)
def test_an_argument_may_be_mentioned_in_these_ways(doc: str) -> None:
    assert mentions(doc, "axis")


@pytest.mark.parametrize("doc", ["along an axis", "axis", "the axis of values: x", "`axis_names`", "yaxis: y"])
def test_a_passing_word_is_no_documentation(doc: str) -> None:
    assert not mentions(doc, "axis")


@pytest.mark.parametrize(
    "doc",
    [
        "Example:\n\n```python\nassert 1 + 1 == {}\n```\n",
        "Example:\n    >>> 1 + 1\n    {}\n",
        "Example::\n\n    assert 1 + 1 == {}\n",
    ],
)
def test_wrong_examples_fail_and_right_ones_pass(doc: str) -> None:
    (right,) = examples_of(doc.format(2))
    run_example(right, "right")
    (wrong,) = examples_of(doc.format(3))
    with pytest.raises(AssertionError):
        run_example(wrong, "wrong")
