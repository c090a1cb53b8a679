"""The policy losses once more, written for reading and nothing else: loops over rows, float64, gradients by autograd.

Every function takes one row of valid tokens (log_prob with gradient, old log_prob, advantages, weights) and returns the
loss of each of them; `total` puts rows together. Nothing here is shared with the library.
"""

from __future__ import annotations

import math

import torch

LOW, HIGH, C = 0.2, 0.28, 3.0


def clip_of(r):
    return torch.clamp(r, 1 - LOW, 1 + HIGH)


def vanilla(new, old, adv, w):
    r = torch.exp(new - old)
    x = torch.maximum(-adv * r, -adv * clip_of(r))
    return torch.where(adv < 0, torch.minimum(x, -adv * C), x) * w


def gspo(new, old, adv, w):
    s = torch.exp((new - old).mean().detach()) * torch.exp(new - new.detach())
    return torch.maximum(-adv * s, -adv * clip_of(s)) * w


def sapo(new, old, adv, w):
    tau = torch.where(adv > 0, 1.0, 1.05 * torch.ones_like(adv))
    return -adv * 4 / tau * torch.sigmoid(tau * (torch.exp(new - old) - 1)) * w


def gpg(new, old, adv, w):
    return -new * adv * w


def cispo(new, old, adv, w):
    return -clip_of(torch.exp(new - old)).detach() * adv * new * w


def dppo_tv(new, old, adv, w):
    p, q = new.detach().exp(), old.exp()
    keep = torch.where(adv > 0, p - q <= HIGH, p - q >= -LOW)
    return -adv * torch.clamp(p / q, max=C) * keep * new * w


def dppo_kl(new, old, adv, w):
    p, q = new.detach().exp(), old.exp()
    d = q * (q.log() - p.log()) + (1 - q) * torch.log((1 - q + 1e-8) / (1 - p + 1e-8))
    keep = torch.where(adv > 0, (d <= HIGH) | (p <= q), (d <= LOW) | (p >= q))
    return -adv * torch.clamp(p / q, max=C) * keep * new * w


def dro(new, old, adv, w):
    return -(new * adv - 0.7 / 2 * (new - old) ** 2) * w


def geo_mean(new, old, adv, w):
    """The row's one loss, shared out evenly, so that its sum is the row's."""
    kept = []
    for d, a in zip(new - old, adv):
        bounded = torch.clamp(d, -LOW, HIGH)
        kept.append(torch.minimum(d, bounded) if a > 0 else torch.maximum(d, bounded) if a < 0 else 0.0 * d)
    n = len(adv)
    weight = math.prod(w.tolist()) ** (1 / n)
    x = -adv.mean() * torch.exp(torch.stack(kept).mean()) * weight
    return x.expand(n) / n


PER_ROW = {
    "vanilla": vanilla, "gspo": gspo, "sapo": sapo, "gpg": gpg, "reinforce": gpg, "cispo": cispo, "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl, "dro": dro, "geo_mean": geo_mean, "bypass_mode": vanilla,
}  # fmt: skip
FORCED = {"gspo": "seq-mean-token-mean", "sapo": "seq-mean-token-mean", "geo_mean": "seq-mean-token-sum"}


def over_all_tokens(name, new, old, adv, w):
    """clip_cov (every candidate is taken) and kl_cov (a tenth, at least one, is charged), on the flat valid tokens."""
    r, d = torch.exp(new - old), new - old
    cov = ((adv - adv.mean()) * (new - new.mean())).detach()
    plain, clipped = -adv * r, -adv * clip_of(r)
    if name == "clip_cov":
        taken = (cov > 0.1) & (cov < 5.0) & (clipped <= plain)
        return torch.maximum(plain, clipped) * ~taken * w
    charged = torch.zeros_like(r)  # float64: a truth value times 0.1 would be the 0.1 of float32
    charged[torch.argsort(cov, descending=True, stable=True)[: max(1, int(0.1 * len(r)))]] = 0.1
    return (plain + charged * d.abs()) * w


def total(name, mode, batch, weights=None):
    """The aggregated loss of a batch in float64: rows of valid tokens only, empty rows left out."""
    mask = batch["response_mask"].bool()
    weights = torch.ones(mask.shape) if weights is None else weights
    new, old, adv, w = (x.double() for x in (batch["log_prob"], batch["old_log_prob"], batch["advantages"], weights))
    rows = [i for i in range(len(mask)) if mask[i].any()]
    if name in ("clip_cov", "kl_cov"):
        flat = over_all_tokens(name, new[mask], old[mask], adv[mask], w[mask])
        losses = list(flat.split([int(mask[i].sum()) for i in rows]))
    else:
        losses = [PER_ROW[name](*(x[i][mask[i]] for x in (new, old, adv, w))) for i in rows]
    mode = FORCED.get(name, mode)
    sums = torch.stack([x.sum() for x in losses])
    if mode == "token-sum":
        return sums.sum()
    if mode == "token-mean":
        return sums.sum() / mask.sum()
    if mode == "seq-mean-token-mean":
        return torch.stack([x.mean() for x in losses]).mean()
    return sums.mean() / (mask.shape[1] if mode == "seq-mean-token-sum-norm" else 1)
