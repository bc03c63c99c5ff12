"""What a public name owes its user: a docstring that names every argument, and an example that runs."""

import contextlib
import dataclasses
import doctest
import enum
import inspect
import io
import re
import textwrap
from collections.abc import Callable
from typing import Any

import keras

from tests.house.import_rules import PACKAGE

SAVEABLE = (
    keras.Layer,
    keras.losses.Loss,
    keras.metrics.Metric,
    keras.optimizers.Optimizer,
    keras.optimizers.schedules.LearningRateSchedule,
    keras.initializers.Initializer,
    keras.regularizers.Regularizer,
)


def docstring_of(value: Any) -> str:
    """The object's own docstring: an inherited one, or the one that dataclasses write, does not count."""
    doc = (vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__) or ""
    generated = dataclasses.is_dataclass(value) and doc.startswith(f"{getattr(value, '__name__', '')}(")
    return "" if generated else inspect.cleandoc(doc)


def arguments_of(value: Any) -> list[str]:
    """The arguments that the package itself defines for the callable `value`."""
    if inspect.isclass(value):
        owner = next((c for c in value.__mro__ if "__init__" in vars(c)), object)
        is_data = issubclass(value, BaseException | enum.Enum) or getattr(value, "_is_protocol", False)
        if is_data or not owner.__module__.startswith(PACKAGE.split(".")[0]):
            return []
        signature = inspect.signature(vars(owner)["__init__"])
        names = list(signature.parameters)[1:]
    else:
        names = list(inspect.signature(value).parameters)
    return [name for name in names if not name.startswith("_") and name not in ("args", "kwargs")]


def mentions(doc: str, argument: str) -> bool:
    """Whether `doc` says something of `argument`: in backticks, or at the head of a line, before a colon."""
    name = rf"\*{{0,2}}`?\*{{0,2}}{re.escape(argument)}`?"
    ticked = rf"`\*{{0,2}}{re.escape(argument)}[`=:(\s.\[]"
    headed = rf"^\s*(?:[*`\w]+,\s*)*{name}(?:,\s*[*`\w]+)*(?:\s*\([^\n]*\))?:"
    return bool(re.search(ticked, doc) or re.search(headed, doc, re.MULTILINE))


def examples_of(doc: str) -> list[str]:
    """The code of the examples: fenced ```python blocks, `>>>` sessions, and blocks after `Example::`."""
    fenced = [textwrap.dedent(code) for code in re.findall(r"```python\n(.*?)```", doc, re.DOTALL)]
    plain = re.sub(r"```.*?```", "", doc, flags=re.DOTALL)
    indented = re.findall(r"^ *[^\n]*::\n\n((?:(?: {2,}[^\n]*)?\n)+)", plain + "\n", re.MULTILINE)
    blocks = [textwrap.dedent(code) for code in indented]
    if ">>>" in re.sub(r"::\n\n(?: {2,}[^\n]*\n|\n)+", "", plain):
        blocks.append(plain)
    return [code for code in fenced + blocks if code.strip()]


def run_example(code: str, name: str) -> None:
    """Run one example in an empty namespace; a failure says which line, and what it gave."""
    if ">>>" not in code:
        exec(compile(code, f"<example of {name}>", "exec"), {"__name__": "example"})
        return
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    test = doctest.DocTestParser().get_doctest(code, {"__name__": "example"}, name, None, 0)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        result = doctest.DocTestRunner(optionflags=options).run(test, out=said.write, clear_globs=False)
    if result.failed:
        raise AssertionError(f"the example of {name} does not give what it says:\n{said.getvalue()}")


def faults(name: str, value: Any) -> list[str]:
    """What is missing in the documentation of the public object `value`."""
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        return []
    doc = docstring_of(value)
    if len(doc) < 20:
        return [f"{name} has no docstring of its own"]
    found = []
    arguments = arguments_of(value)
    if arguments and not re.search(r"^\s*Args:", doc, re.MULTILINE):
        found.append(f"{name} takes {', '.join(arguments)}, but its docstring has no `Args:`")
    found += [f"{name} does not document `{a}`" for a in arguments if not mentions(doc, a)]
    if _returns_something(value) and not re.search(r"^\s*(Returns|Yields):", doc, re.MULTILINE):
        found.append(f"{name} returns something, but its docstring has no `Returns:`")
    is_error = inspect.isclass(value) and issubclass(value, BaseException)
    is_base = inspect.isabstract(value) or getattr(value, "_is_protocol", False)
    if not (is_error or is_base or examples_of(doc)):
        found.append(f"{name} has no example: a ```python block or a >>> session")
    if inspect.isclass(value) and issubclass(value, SAVEABLE) and not is_base:
        registered = keras.saving.get_registered_name(value)
        if not registered.startswith(f"{PACKAGE}>"):
            found.append(f'{name} is not registered: @keras.saving.register_keras_serializable("{PACKAGE}")')
    return found


def _returns_something(value: Callable[..., Any]) -> bool:
    if inspect.isclass(value):
        return False
    return inspect.signature(value).return_annotation not in (None, "None")
