"""Evaluate small expressions over a run's figures from the tables' data files: ``acc``, ``matrix[-1, 3]``."""

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
    """An expression has no value for a run; the message says why."""


class Unrecorded(Undefined):
    """A run does not record a name in the expression, e.g. because it is older, so the value is unknown."""


def evaluate(expression: str, names: Mapping[str, Any]) -> Any:
    """Return the value of an expression: a number, a list of numbers and None, or what a function among names returns.

    An expression has numbers, texts, names, ``+ - * /``, subscripts (``matrix[-1, 0]`` is row, column) and calls of
    functions among the names.

    Args:
        expression: e.g. ``(seconds - gpse_seconds) / client_epochs``.
        names: name -> value or function.

    Raises:
        Unrecorded: a name is unknown.
        Undefined: an index is out of range, a divisor is zero, an operand is not a number, a named value is null, or
            the result is null or not finite.
        SyntaxError: the text is not such an expression.
    """
    value = _value(ast.parse(expression, mode="eval").body, names, expression)
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        raise Undefined(f"{expression} has no value")
    return value


def check(expression: str) -> None:
    """Refuse an expression that :func:`evaluate` does not understand.

    Raises:
        SyntaxError: the text is not such an expression.
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
