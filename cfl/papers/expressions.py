"""Small expressions over a run's figures, as the tables' data files hold them: ``acc``, ``matrix[-1, 3]``."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


class Undefined(ValueError):
    """An expression that has no value for this run; the message says why."""


class Unrecorded(Undefined):
    """A run does not record what is named, as one made before that was recorded: nothing is known of the value."""


def evaluate(expression: str, names: Mapping[str, Any]) -> Any:
    """The value of an expression: a number, or a list of numbers and None.

    There are numbers, texts, names, ``+ - * /``, subscripts (``matrix[-1, 0]`` is row, column) and calls of functions
    among the names.

    Args:
        expression: e.g. ``(seconds - gpse_seconds) / client_epochs``.
        names: what may be named.

    Raises:
        Unrecorded: a name is not there.
        Undefined: an index is out of range, a division by zero, or what is named or the value is null or NaN.
        SyntaxError: this is no such expression.
    """
    value = _value(ast.parse(expression, mode="eval").body, names, expression)
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        raise Undefined(f"{expression} has no value")
    return value


def check(expression: str) -> None:
    """Refuse what :func:`evaluate` would not understand.

    Raises:
        SyntaxError: this is no such expression.
    """
    allowed = (ast.Expression, ast.Constant, ast.Name, ast.BinOp, ast.UnaryOp, ast.Subscript, ast.Tuple, ast.Call)
    for node in ast.walk(ast.parse(expression, mode="eval")):
        known = isinstance(node, (*allowed, ast.Load)) or type(node) in _OPERATORS
        if not known or (isinstance(node, ast.Call) and (node.keywords or not isinstance(node.func, ast.Name))):
            raise SyntaxError(f"{type(node).__name__} is not understood in {expression!r}")


def _value(node: ast.expr, names: Mapping[str, Any], text: str) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            if name not in names:
                raise Unrecorded(f"{text}: the run does not record {name}")
            if names[name] is None:
                raise Undefined(f"{text}: the run has no {name}")
            return names[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_number(_value(operand, names, text), text))
        case ast.BinOp(op=op, left=left, right=right) if type(op) in _OPERATORS:
            a, b = (_number(_value(side, names, text), text) for side in (left, right))
            if isinstance(op, ast.Div) and b == 0:
                raise Undefined(f"{text}: division by zero")
            return _OPERATORS[type(op)](a, b)
        case ast.Subscript(value=container, slice=index):
            found = _value(container, names, text)
            places = index.elts if isinstance(index, ast.Tuple) else [index]
            for place in places:
                try:
                    found = found[_value(place, names, text)]
                except (IndexError, TypeError, KeyError):
                    raise Undefined(f"{text}: there is no such entry") from None
            return found
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if callable(names.get(name)):
            return names[name](*(_value(argument, names, text) for argument in arguments))
    raise SyntaxError(f"{ast.unparse(node)} is not understood in {text!r}")


def _number(value: Any, text: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Undefined(f"{text}: {value!r} is no number")
    return value
