"""The least energy of a step that takes no longer than it must: how much each group of its actions can be slowed down.

An action that is slowed down by x takes x times its seconds, and its dynamic energy falls with 1 / x^2
(`scheduling.dvfs`). So energy is a convex function of the slowdowns. That a step takes no longer is a linear constraint
for every path through the graph of its actions. There are too many paths to list, but few of them matter: the problem
is solved with those that are known, the paths which then take too long are added, and so on until there are none
(cutting planes: Kelley, 1960). Each problem is solved by a primal-dual interior-point method (Wright, 1997).

With a group for each action this is the problem of Perseus (Chung et al., SOSP 2024) in continuous time.
"""

from __future__ import annotations

import numpy as np

from elaswave_spmd.scheduling.action_graph import ActionGraph

_PATHS_A_ROUND, _MOST_ROUNDS = 40, 60
_TOO_LONG = 1e-4  # a path may take this part more than the step while paths are searched for; the result may not
_FAR = 0.005  # a path that takes less by this part is left out
_INTERIOR = 2e-5  # the part by which paths are longer for the interior-point method, which needs room on all of them
_NONE = 1e-3  # a slowdown by less than this part is none
_MOST_SOLVER_STEPS, _CONVERGED, _STATIONARY = 80, 1e-7, 1e-4
_CENTERED, _TO_BOUND = 0.15, 0.99  # of the interior-point method: of the mean gap per step, and of the way to a bound
_MOST_SHORTENED, _HALVINGS = 500, 30


def slowdowns(
    graph: ActionGraph,
    groups: np.ndarray,
    most_s: float,
    slowest: float,
    fixed_s: np.ndarray | None = None,
) -> np.ndarray:
    """The slowdowns with the least energy with which a step takes no longer than `most_s`.

    Args:
        groups: int64 [actions], the group of each action, from 0 on. All actions of a group are slowed down alike.
        most_s: at least what the step takes without slowdowns.
        slowest: the largest slowdown, at least 1.
        fixed_s: float64 [actions], seconds that an action takes beside its own, whatever its slowdown; None: 0.

    Returns: float64 [groups], from 1 to `slowest`.
    """
    size = int(groups.max(initial=-1)) + 1
    fixed = np.zeros(len(groups)) if fixed_s is None else fixed_s
    weights = np.bincount(groups, graph.seconds, size)
    if slowest <= 1 or not weights.any():
        return np.ones(size)
    found = np.full(size, slowest)
    table, limits, known = np.zeros((0, size)), np.zeros(0), set()
    for _ in range(_MOST_ROUNDS):
        rows, most = _too_long(graph, groups, found, fixed, most_s, known)
        if not rows:
            break
        table, limits = np.vstack([table, *rows]), np.append(limits, most)
        found = _least(weights, table, limits * (1 + _INTERIOR), slowest)
        # Paths that are far from too long cost time in every problem; one that matters after all is found again.
        matters = table @ found > limits * (1 - _FAR)
        known -= {row.tobytes() for row in table[~matters]}
        table, limits = table[matters], limits[matters]
    found = np.where(found < 1 + _NONE, 1.0, found)
    return _shortened(graph, groups, found, fixed, most_s)


def _too_long(
    graph: ActionGraph, groups: np.ndarray, found: np.ndarray, fixed: np.ndarray, most_s: float, known: set[bytes]
) -> tuple[list[np.ndarray], list[float]]:
    """Paths that take too long with these slowdowns: their seconds by group, and the most that these may take.

    Args:
        known: paths that were returned before; they are not again.
    """
    paths = graph.longest_paths(graph.seconds * found[groups] + fixed)
    covered = np.zeros(len(groups), bool)
    rows, limits = [], []
    for action in np.argsort(-paths.through, kind="stable").tolist():
        if paths.through[action] <= most_s * (1 + _TOO_LONG) or len(rows) == _PATHS_A_ROUND:
            break
        if covered[action]:
            continue
        path, links_s = paths.path(action)
        covered[path] = True
        row = np.bincount(groups[path], graph.seconds[path], len(found))
        if (key := row.tobytes()) not in known:
            known.add(key)
            rows.append(row)
            limits.append(most_s - links_s - float(fixed[path].sum()))
    return rows, limits


def _shortened(
    graph: ActionGraph, groups: np.ndarray, found: np.ndarray, fixed: np.ndarray, most_s: float
) -> np.ndarray:
    """These slowdowns, less where a path still takes a little too long."""
    allowed = most_s * (1 + 1e-12)
    for _ in range(_MOST_SHORTENED):
        paths = graph.longest_paths(graph.seconds * found[groups] + fixed)
        worst = int(paths.through.argmax())
        if paths.through[worst] <= allowed:
            return found
        path, links_s = paths.path(worst)
        least_s = float(graph.seconds[path].sum() + fixed[path].sum()) + links_s
        part = max(0.0, (most_s - least_s) / (paths.through[worst] - least_s)) * (1 - 1e-9)
        on_path = np.unique(groups[path])
        found[on_path] = 1 + (found[on_path] - 1) * part
    good, bad = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (good + bad) / 2
        takes = graph.makespan(graph.seconds * (1 + middle * (found - 1))[groups] + fixed)
        good, bad = (middle, bad) if takes <= allowed else (good, middle)
    return 1 + good * (found - 1)


def _least(weights: np.ndarray, table: np.ndarray, limits: np.ndarray, slowest: float) -> np.ndarray:
    """The x from 1 to `slowest` with the least sum of weights / x^2 for which table @ x <= limits.

    A primal-dual interior-point method; the start need not be feasible.

    Args:
        weights: float64 [variables], not below 0.
        table: float64 [constraints, variables].
        limits: float64 [constraints].
    """
    weights = weights / weights.mean()
    scale = limits.max()
    table, limits = table / scale, limits / scale
    x = np.full(len(weights), 1 + 0.3 * (slowest - 1))
    slack = np.maximum(limits - table @ x, 0.05)
    # The multipliers of the constraints, of x >= 1, and of x <= slowest.
    price, low, high = (np.full(size, 0.1) for size in (len(limits), len(x), len(x)))
    for _ in range(_MOST_SOLVER_STEPS):
        over_low, under_high = x - 1, slowest - x
        gap = (slack @ price + over_low @ low + under_high @ high) / (len(limits) + 2 * len(x))
        dual = table.T @ price - 2 * weights / x**3 - low + high
        primal = table @ x + slack - limits
        if gap < _CONVERGED and np.abs(primal).max() < _CONVERGED and np.abs(dual).max() < _STATIONARY:
            break
        aim = _CENTERED * gap
        # Newton's equations, reduced to one for each constraint: all others are diagonal.
        curve = 6 * weights / x**4 + low / over_low + high / under_high
        right = -dual + (aim / over_low - low) - (aim / under_high - high)
        to_center = aim / price - slack
        scaled = table / curve
        matrix = scaled @ table.T
        matrix[np.diag_indices(len(limits))] += slack / price
        d_price = np.linalg.solve(matrix, scaled @ right + primal + to_center)
        dx = (right - table.T @ d_price) / curve
        d_slack = to_center - slack / price * d_price
        d_low = aim / over_low - low - low / over_low * dx
        d_high = aim / under_high - high + high / under_high * dx
        each = ((over_low, dx), (under_high, -dx), (slack, d_slack), (price, d_price), (low, d_low), (high, d_high))
        length = min(_way_to_zero(values, change) for values, change in each)
        x, slack, price = x + length * dx, slack + length * d_slack, price + length * d_price
        low, high = low + length * d_low, high + length * d_high
    return x


def _way_to_zero(values: np.ndarray, change: np.ndarray) -> float:
    """The part of a change after which all values, which are above 0, still are; at most 1."""
    falls = change < 0
    return min(1.0, _TO_BOUND * float((-values[falls] / change[falls]).min())) if falls.any() else 1.0
