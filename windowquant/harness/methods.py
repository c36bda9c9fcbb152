"""Methods from configuration values, with types checked before the method's own code sees them."""

from collections.abc import Mapping
from typing import Any

from windowquant.errors import UserError
from windowquant.method import Method, get_method


def build_method(name: str, params: Mapping[str, Any]) -> Method:
    """The method called `name` with the given hyper-parameters.

    Raises:
        UserError: unknown name (the known ones are listed), unknown hyper-parameter, wrong type, or out of range.
    """
    defaults = get_method(name)
    for param, value in params.items():
        _check_type(f"method.{param}", value, getattr(defaults, param, None))
    return get_method(name, **params)


def _check_type(field: str, value: Any, default: Any) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(default, int) and not (number and isinstance(value, int)):
        raise UserError(f"{field} is {value!r}: give a whole number.")
    if isinstance(default, float) and not number:
        raise UserError(f"{field} is {value!r}: give a number.")
