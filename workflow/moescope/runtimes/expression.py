"""Arithmetic in a preset: ``decode_ms / 1000``. Numbers, names, brackets and + - * / only."""

import ast
import operator
from collections.abc import Mapping

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def names(text: str) -> set[str]:
    """The names that an expression uses. Raises ValueError if it is no such expression."""
    return {node.id for node in ast.walk(_parse(text)) if isinstance(node, ast.Name)}


def value(text: str, variables: Mapping[str, float]) -> float:
    """The value of an expression.

    Raises ValueError if it is no such expression or divides by zero, KeyError if a name is missing.
    """
    try:
        return _value(_parse(text), variables)
    except ZeroDivisionError:
        raise ValueError(f"{text!r} divides by zero") from None


def _parse(text: str) -> ast.expr:
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        raise ValueError(f"{text!r} is no arithmetic") from None
    _check(tree, text)
    return tree


def _check(node: ast.AST, text: str) -> None:
    match node:
        case ast.Name():
            return
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            return
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            _check(operand, text)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            _check(left, text)
            _check(right, text)
        case _:
            raise ValueError(f"{text!r}: only numbers, names, + - * / and brackets are allowed")


def _value(node: ast.AST, variables: Mapping[str, float]) -> float:
    match node:
        case ast.Name(id=name):
            return variables[name]
        case ast.Constant(value=number):
            return number
        case ast.UnaryOp(operand=operand):
            return -_value(operand, variables)
        case ast.BinOp(left=left, op=op, right=right):
            return OPERATORS[type(op)](_value(left, variables), _value(right, variables))
    raise AssertionError(node)
