"""The estimators once more, written for reading: loops over groups, rows and tokens in float64, no shared code.

Every function takes lists of rows; a row is the list of its valid positions with their rewards. Group statistics are
NumPy's.
"""

from __future__ import annotations

import numpy as np


def groups(uids):
    return [[i for i, u in enumerate(uids) if u == g] for g in dict.fromkeys(uids)]


def whiten(rows):
    """Rows of numbers -> the same rows, whitened over all of them."""
    flat = np.array([x for row in rows for x in row])
    if len(flat) < 2:
        return [[x - flat.mean() for x in row] for row in rows]
    scale = 1 / np.sqrt(flat.var(ddof=1) + 1e-8)
    return [[(x - flat.mean()) * scale for x in row] for row in rows]


def per_response(one_group):
    """An estimator that gives each response one number, from the rewards and lengths of its group."""

    def estimate(b):
        scores, found = [sum(r) for r in b["rewards"]], [0.0] * len(b["rewards"])
        for members in groups(b["uids"]):
            if len(members) > 1:
                values = one_group(np.array([scores[i] for i in members]), [len(b["rewards"][i]) for i in members])
                for i, value in zip(members, values):
                    found[i] = float(value)
        return found

    return estimate


def spread(estimate):
    return lambda b: [[a] * len(r) for a, r in zip(estimate(b), b["rewards"])]


def leave_one_out(R, n):
    return [r - np.delete(R, i).mean() for i, r in enumerate(R)]


def best_minus_second(R, n):
    order = np.sort(R)
    return [(order[-1] - order[-2]) / (R.std(ddof=1) + 1e-6) if r == order[-1] else 0.0 for r in R]


def length_weighted(R, n):
    return R - (np.array(n) @ R / sum(n) if sum(n) else 0.0)


grpo = per_response(lambda R, n: (R - R.mean()) / (R.std(ddof=1) + 1e-6))
centred = per_response(lambda R, n: R - R.mean())


def gpg(b):
    degenerate = 0
    for members in groups(b["uids"]):
        if len({sum(b["rewards"][i]) for i in members}) == 1:
            degenerate += len(members)
    total = len(b["rewards"])
    scale = total / (total - degenerate) if degenerate < total else 1.0
    return [scale * a for a in centred(b)]


def gdpo(b):
    total = np.zeros(len(b["rewards"]))
    for key in ("first", "second"):
        total += np.array(grpo({"uids": b["uids"], "rewards": [[x] for x in b[key]]}))
    return whiten([[a] * len(r) for a, r in zip(total, b["rewards"])])


def backwards(row, values, gamma, lam):
    """Raw advantages of one row of valid tokens."""
    result, running, after = [], 0.0, 0.0
    for r, v in zip(reversed(row), reversed(values)):
        running = r + gamma * after - v + gamma * lam * running
        after = v
        result.append(running)
    return result[::-1]


def gae(b):
    return whiten([backwards(r, v, b["gamma"], b["lam"]) for r, v in zip(b["rewards"], b["values"])])


def vapo(b):
    rows = []
    for r, v in zip(b["rewards"], b["values"]):
        lam = min(1.0, max(0.0, 1 - 1 / (0.05 * len(r)))) if r else 0.0
        rows.append(backwards(r, v, b["gamma"], lam))
    return whiten(rows)


def returns(row, gamma):
    return backwards(row, [0.0] * len(row), gamma, 1.0)


def rewards_to_go(b):
    return [returns(r, 1.0) for r in b["rewards"]]


def gigpo(b):
    """Weight 0.7 on the turns; a turn has the tokens from its place to the next turn's."""
    met = {}
    for i, (row, states) in enumerate(zip(b["rewards"], b["turn_states"])):
        ends = [place for place, _ in states[1:]] + [len(row)]
        parts = [(place, end, state) for (place, state), end in zip(states, ends)]
        for k, (place, end, state) in enumerate(parts):
            later = [sum(row[begin:stop]) for begin, stop, _ in parts[k:]]
            gain = sum(b["gamma"] ** n * reward for n, reward in enumerate(later))
            if end > place:
                met.setdefault((b["uids"][i], state), []).append((i, place, end, gain))
    result = [[a] * len(r) for a, r in zip(grpo(b), b["rewards"])]
    for turns in met.values():
        gains = np.array([gain for *_, gain in turns])
        for i, place, end, gain in turns if len(turns) > 1 else []:
            for t in range(place, end):
                result[i][t] += 0.7 * (gain - gains.mean()) / (gains.std(ddof=1) + 1e-6)
    return result


def otb(tail):
    """By number of generated tokens, which for rows without holes is the position."""

    def estimate(b):
        found = [[0.0] * len(r) for r in b["rewards"]]
        G = rewards_to_go(b)
        W = [np.cumsum(1 - 2 * np.exp(p) + np.array(s)) for p, s in zip(b["old_log_probs"], b["sum_pi_squared"])]
        for members in groups(b["uids"]):
            members = [i for i in members if b["rewards"][i]]
            if len(members) < 2:
                continue
            lengths = sorted(len(b["rewards"][i]) for i in members)
            for t in range(lengths[-1]):
                there = [i for i in members if len(b["rewards"][i]) > t]
                base = sum(G[i][t] * W[i][t] for i in there) / (sum(W[i][t] for i in there) + 1e-8)
                if tail and len(there) == 1 and lengths[-1] > lengths[-2] and t >= lengths[-2]:
                    base = 0.0
                for i in there:
                    found[i][t] = G[i][t] - base
        return found

    return estimate


ORACLES = {
    "gae": gae,
    "grpo": spread(grpo),
    "grpo_vectorized": spread(grpo),
    "grpo_passk": spread(per_response(best_minus_second)),
    "rloo": spread(per_response(leave_one_out)),
    "rloo_vectorized": spread(per_response(leave_one_out)),
    "opo": spread(per_response(length_weighted)),
    "gpg": spread(gpg),
    "gdpo": gdpo,
    "gigpo": gigpo,
    "reinforce_plus_plus": lambda b: whiten([returns(r, b["gamma"]) for r in b["rewards"]]),
    "reinforce_plus_plus_baseline": lambda b: whiten(spread(centred)(b)),
    "remax": lambda b: [[g - c for g in returns(r, 1.0)] for r, c in zip(b["rewards"], b["reward_baselines"])],
    "optimal_token_baseline": otb(False),
    "tir_optimal_token_baseline": otb(True),
    "vapo": vapo,
}
