"""Linear algebra of half a dozen unknowns; the operator carries no numerical library for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul

Matrix = list[list[float]]


def inverse(matrix: Sequence[Sequence[float]]) -> Matrix:
    """Inverse of a symmetric positive definite matrix, by Cholesky. Raises ValueError when it is not one."""
    lower = _cholesky(matrix)
    size = len(lower)
    columns = [_solved(lower, [float(row == column) for row in range(size)]) for column in range(size)]
    return [[columns[column][row] for column in range(size)] for row in range(size)]


def product(matrix: Matrix, vector: Sequence[float]) -> list[float]:
    return [dot(row, vector) for row in matrix]


def dot(one: Sequence[float], two: Sequence[float]) -> float:
    """Of two of one length."""
    total: float = sum(map(mul, one, two))
    return total


def _cholesky(matrix: Sequence[Sequence[float]]) -> Matrix:
    size = len(matrix)
    lower = [[0.0] * size for _ in range(size)]
    for row in range(size):
        for column in range(row + 1):
            rest = matrix[row][column] - dot(lower[row][:column], lower[column][:column])
            if row == column and rest <= 0:
                raise ValueError("the matrix is not positive definite")
            lower[row][column] = math.sqrt(rest) if row == column else rest / lower[column][column]
    return lower


def _solved(lower: Matrix, right: list[float]) -> list[float]:
    size = len(lower)
    middle: list[float] = []
    for row in range(size):
        middle.append((right[row] - dot(lower[row][:row], middle)) / lower[row][row])
    found = [0.0] * size
    for row in reversed(range(size)):
        above = sum(lower[other][row] * found[other] for other in range(row + 1, size))
        found[row] = (middle[row] - above) / lower[row][row]
    return found
