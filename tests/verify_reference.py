"""An independent reference of verification: NumPy in float64, one request and one step after the other.

It shares no code with the library: the generator is written again from Salmon et al. (SC 2011), filters sort whole
rows, and q is taken to the full vocabulary. A close decision may fall the other way by rounding, so the reference
reports how close its closest decision was.
"""

import dataclasses

import numpy as np

ACCEPT, RESIDUAL = 1, 2
ROTATIONS = [13, 15, 26, 6, 17, 29, 16, 24]


def threefry(k0: int, k1: int, x0: int, x1: int) -> int:
    """First word of threefry2x32-20 in plain integers."""
    m = 0xFFFFFFFF
    keys = [k0, k1, k0 ^ k1 ^ 0x1BD11BDA]
    x0, x1 = (x0 + k0) & m, (x1 + k1) & m
    for r in range(20):
        x0 = (x0 + x1) & m
        x1 = ((x1 << ROTATIONS[r % 8]) | (x1 >> (32 - ROTATIONS[r % 8]))) & m
        x1 ^= x0
        if r % 4 == 3:
            i = r // 4 + 1
            x0, x1 = (x0 + keys[i % 3]) & m, (x1 + keys[(i + 1) % 3] + i) & m
    return x0


def uniform(seed: int, position: int, step: int, stream: int, token: int) -> float:
    bits = threefry(int(seed), int(position), int(token), stream * 65536 + int(step))
    return min((bits + 0.5) / 2**32, 1 - 2**-24)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def processed(row, temperature, allowed=None, min_p=None, top_k=None, top_p=None) -> np.ndarray:
    """Allowed tokens, temperature, min-p, top-k, top-p of one row [V], by sorting; all zeros where nothing is left."""
    row = np.array(row, np.float64)
    if allowed is not None:
        row[~np.asarray(allowed)] = -np.inf
    if not np.isfinite(row).any() or np.isnan(row).any():
        return np.zeros(len(row))
    if not temperature >= 1e-5:
        return np.eye(len(row))[np.argmax(row)]
    p = softmax(row / temperature)
    if min_p is not None and min_p > 0:
        p[p < min_p * p.max()] = 0
    order = np.argsort(-p, kind="stable")
    if top_k is not None and top_k > 0:
        p[p < p[order[min(top_k, len(p)) - 1]]] = 0
    p /= p.sum()
    if top_p is not None and top_p < 1:
        before = np.concatenate([[0.0], np.cumsum(p[order])[:-1]])
        kept = max(int((before < top_p).sum()), 1)
        p[p < p[order[kept - 1]]] = 0
    return p / p.sum()


@dataclasses.dataclass
class Outcome:
    num_accepted: int
    tokens: list[int]
    accept_prob: list[float]
    logprobs: list[float]
    closest: float


def verify_one(tokens, n, q_rows, p_rows, seed, position, stop=()) -> Outcome:
    """Verify one request: tokens [S], q_rows [S, V], p_rows [S+1, V] (probabilities)."""
    closest, accepted = np.inf, n
    for s in range(n):
        x = tokens[s]
        u = uniform(seed, position, s, ACCEPT, x)
        closest = min(closest, abs(u * q_rows[s][x] - p_rows[s][x]))
        if not u * q_rows[s][x] < p_rows[s][x]:
            accepted = s
            break
    p = p_rows[accepted]
    left = np.maximum(p - q_rows[accepted], 0) if accepted < n else p
    if not (left > 0).any():
        left = p
    noise = np.array([-np.log(-np.log1p(-uniform(seed, position, accepted, RESIDUAL, i))) for i in range(len(p))])
    with np.errstate(divide="ignore"):
        score = np.log(left) + noise
    best = np.sort(score[np.isfinite(score)])
    closest = min(closest, best[-1] - best[-2] if len(best) > 1 else np.inf)
    committed = [int(t) for t in tokens[:accepted]] + [int(np.argmax(score))]
    for i, token in enumerate(committed):
        if token in stop:
            committed = committed[: i + 1]
            break
    chances = [min(1.0, p_rows[s][tokens[s]] / q_rows[s][tokens[s]]) for s in range(n)]
    logs = [float(np.log(p_rows[i][t])) for i, t in enumerate(committed)]
    return Outcome(min(accepted, len(committed)), committed, chances, logs, closest)
