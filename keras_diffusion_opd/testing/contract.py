"""One contract: named checks that run in order; the first that fails says what was expected and received."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

# What a contract is held under besides float32, and the largest error it may show there, relative to
# the largest value. Half precision rounds to 2^-11 (float16) and 2^-8 (bfloat16); a layer is allowed
# about a dozen roundings.
TOLERANCES: dict[str, float] = {"mixed_float16": 0.01, "mixed_bfloat16": 0.08, "bfloat16": 0.08}

# Two float32 computations of one value: rounding to 2^-24, summed in another order.
FLOAT32_TOLERANCE = 1e-5


class ContractError(AssertionError):
    """An object does not do what every Keras object of its kind must do.

    The message names the object, the check, what was expected, what was received and the mend.

    Example:
        >>> import keras_diffusion_opd as kdo
        >>> try:
        ...     kdo.testing.check_layer_contract(dict, {}, [])
        ... except kdo.testing.ContractError as error:
        ...     print(str(error)[:22])
        `dict` fails `config`:
    """


@dataclasses.dataclass(frozen=True)
class Report:
    """What a contract found: nothing but passed and skipped checks, since a failing one raises.

    Args:
        subject: the name of the class or model.
        passed: the names of the checks that ran, in order.
        skipped: for each check left out, the reason that the caller gave.

    Example:
        >>> import keras_diffusion_opd as kdo
        >>> print(kdo.testing.Report("Scale", passed=("config", "build"), skipped={"fit": "no weights"}))
        Scale: 2 checks passed (config, build), 1 skipped (fit: no weights)
    """

    subject: str
    passed: tuple[str, ...]
    skipped: Mapping[str, str]

    def __str__(self) -> str:
        text = f"{self.subject}: {len(self.passed)} checks passed ({', '.join(self.passed)})"
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.skipped.items())
        return f"{text}, {len(self.skipped)} skipped ({reasons})" if reasons else text


def known_policies(policies: Sequence[str]) -> tuple[str, ...]:
    """`policies`, if a tolerance is known for each."""
    unknown = [name for name in policies if name not in TOLERANCES]
    if unknown:
        raise ValueError(f"`policies` must be of {list(TOLERANCES)}. Received {unknown}.")
    return tuple(policies)


def run_checks(subject: str, checks: Mapping[str, Callable[[], None]], skip: Mapping[str, str] | None) -> Report:
    """Run `checks` in order but for those in `skip`, which maps a check to the reason for leaving it out."""
    skip = dict(skip or {})
    for name, reason in skip.items():
        if name not in checks:
            known = ", ".join(checks)
            raise ValueError(f"`skip` must name checks. Received {name!r}. The checks are: {known}.")
        if not (isinstance(reason, str) and reason.strip()):
            raise ValueError(f"`skip[{name!r}]` must be the reason, a string. Received {reason!r}.")
    passed = []
    for name, check in checks.items():
        if name in skip:
            continue
        try:
            check()
        except Exception as error:
            said = str(error) or type(error).__name__
            if not isinstance(error, AssertionError):
                said = f"{type(error).__name__}: {said}"
            raise ContractError(f"`{subject}` fails `{name}`: {said}") from error
        passed.append(name)
    return Report(subject, tuple(passed), skip)
