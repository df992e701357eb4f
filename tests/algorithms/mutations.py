"""Deliberate breaks of the objective: `run_mutations.py` sees that the tests of this folder catch every one.

Each is (what is wrong then, file, text that occurs once in it, what it becomes).
"""

from typing import NamedTuple


class Mutation(NamedTuple):
    name: str
    file: str
    old: str
    new: str


LOSS = [
    ("sign of A in reinforce", "return -adv_BT * lp_BT, nowhere", "return adv_BT * lp_BT, nowhere"),
    ("sign of A in linear", "return -adv_BT * u_BT, nowhere", "return adv_BT * u_BT, nowhere"),
    ("sign of A in weighted", "return -adv_BT * k_BT * lp_BT", "return adv_BT * k_BT * lp_BT"),
    ("other policies are not detached", "inside(values_BT.detach()) for", "inside(values_BT) for"),
    ("`current` is not detached", '{"current": lp_BT.detach()}', '{"current": lp_BT}'),
    ("the kernel is not detached", "log_u_BT = log_u_BT.detach()", "log_u_BT = log_u_BT * 1"),
    ("min for max in the clip", "torch.maximum(-adv_BT * u_BT", "torch.minimum(-adv_BT * u_BT"),
    ("the clip ignores lo", "u_BT.clamp(surrogate.lo, surrogate.hi)", "u_BT.clamp(max=surrogate.hi)"),
    ("the clip ignores hi", "u_BT.clamp(surrogate.lo, surrogate.hi)", "u_BT.clamp(min=surrogate.lo)"),
    ("the dual clip where A > 0", "dual_BT = (adv_BT < 0)", "dual_BT = (adv_BT > 0)"),
    ("no dual clip", "(u_BT > surrogate.dual)", "(u_BT > math.inf)"),
    ("u against the proximal policy always", "anchor_BT=fixed[objective.anchor]", 'anchor_BT=fixed["proximal"]'),
    ("pre-clip on the wrong side", "(adv_BT > 0, above_BT,", "(adv_BT > 0, below_BT,"),
    ("pre-clip on both sides", "log_u_BT.clamp(max=math.log(objective.pre_clip.hi))", "log_u_BT.clamp(-0.4, 0.4)"),
    ("exponents without a limit", "log_u_BT.clamp(max=MAX_LOG_RATIO).exp()", "log_u_BT.exp()"),
    (
        "τ by the wrong sign of A",
        "torch.where(adv_BT > 0, surrogate.positive",
        "torch.where(adv_BT < 0, surrogate.positive",
    ),
    ("the soft gate without 1/τ", "(4 / tau_BT)", "4"),
    ("kernels by the wrong sign of A", "k_BT = torch.where(adv_BT > 0", "k_BT = torch.where(adv_BT < 0"),
    ("the inverse kernel is not inverted", "_ratio(-log_u_BT, lo=0.0", "_ratio(log_u_BT, lo=0.0"),
    ("gamma's rate with the wrong sign", "kernel.rate * (1 - u_BT)", "kernel.rate * (u_BT - 1)"),
    (
        "a kernel without its upper bound",
        "_ratio(log_u_BT, lo=kernel.lo, hi=kernel.hi)",
        "_ratio(log_u_BT, lo=kernel.lo, hi=math.inf)",
    ),
    ("prox and beh swapped in ρ", "fixed[weight.p] - fixed[weight.q]", "fixed[weight.q] - fixed[weight.p]"),
    ("clamp and zero swapped", 'if weight.outside == "clamp"', 'if weight.outside != "clamp"'),
    (
        "a zeroing weight ignores lo",
        "(log_w_BT < _log(weight.lo)) | (log_w_BT > _log(weight.hi))",
        "log_w_BT > _log(weight.hi)",
    ),
    ("a sequence's weight per token", "fixed[weight.q], weight.pool)", 'fixed[weight.q], "token")'),
    ("p and q swapped in gates", "fixed[gate.p], fixed[gate.q]", "fixed[gate.q], fixed[gate.p]"),
    ("gates ignore lo", "(stat_BT < lo) | (stat_BT > hi)", "stat_BT > hi"),
    ("gates ignore hi", "(stat_BT < lo) | (stat_BT > hi)", "stat_BT < lo"),
    ("moving away inverted", "(adv_BT * difference_BT > 0)", "(adv_BT * difference_BT < 0)"),
    ("good sequences are gated too", "return out_BT & (adv_BT < 0)", "return out_BT"),
    ("k1 of a gate with the wrong sign", "return -difference\n", "return difference\n"),
    ("k2 of a gate without its half", "return difference.square() / 2", "return difference.square()"),
    (
        "binary KL the other way around",
        "-log_q.exp() * difference + rest_q * (rest_q.log() - rest_p.log())",
        "log_p.exp() * difference + rest_p * (rest_p.log() - rest_q.log())",
    ),
    ("penalties are gated", "penalty.beta * inside(", "(~gated_BT).float() * penalty.beta * inside("),
    (
        "penalties are weighted",
        "penalty.beta * inside(",
        "penalty.beta * (weight_BT if objective.weight else 1) * inside(",
    ),
    ("penalties against the proximal policy", "lp_BT - fixed[penalty.q]", 'lp_BT - fixed["proximal"]'),
    ("k2 without its half", "k2_BT = difference_BT.square() / 2", "k2_BT = difference_BT.square()"),
    (
        "k3 of the other direction",
        "(-difference_BT).clamp(max=MAX_LOG_RATIO).exp() - 1 + difference_BT",
        "difference_BT.clamp(max=MAX_LOG_RATIO).exp() - 1 - difference_BT",
    ),
    ("k3+ with k3's gradient", "(k3_BT - k2_BT).detach()", "(k3_BT - k2_BT)"),
    ("entropy is punished", "value_BT = -entropy_BT", "value_BT = entropy_BT"),
    (
        "the correction has no gradient",
        "clamp(max=MAX_LOG_RATIO).exp()\n\n\ndef interpolated",
        "clamp(max=MAX_LOG_RATIO).exp().detach()\n\n\ndef interpolated",
    ),
    ("α and 1 − α swapped", "1 - 1 / staleness_BT.clamp(min=1)", "1 / staleness_BT.clamp(min=1)"),
    ("fresh tokens take the behaviour policy", "staleness_BT.clamp(min=1), 1.0)", "staleness_BT.clamp(min=1), 0.0)"),
    (
        "masked slots are multiplied, not replaced",
        "return torch.where(mask_BT, values_BT, 0.0)",
        "return values_BT * mask_BT",
    ),
    (
        "masked samples are trained",
        'data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(1)',
        'data["token_mask"][:, 1:]',
    ),
    ("advantages of the token before", 'data["advantages"][:, 1:]', 'data["advantages"][:, :-1]'),
    ("packed sequences are one", "row_B1 * width + ids_BT)", "row_B1 * width + 0 * ids_BT)"),
    ("a mean over the padded row", "pooled / self.sizes_BT.clamp(min=1)", "pooled / self._shape[1]"),
    ("a mean for a sum", 'if how == "mean" else pooled', "if how else pooled"),
    ("a sum for a mean", 'if how == "mean" else pooled', "if not how else pooled"),
    ("max for min", "limit = math.inf if how", "limit = -math.inf if how"),
    ("tokens counted in the micro-batch", "return share_BT / tokens", "return share_BT / share_BT.sum().clamp(min=1)"),
    (
        "sequences counted in the micro-batch",
        "segments.sizes_BT.clamp(min=1) / sequences",
        "segments.sizes_BT.clamp(min=1) / len(share_BT)",
    ),
    (
        "the sequence mean does not divide by length",
        "share_BT / segments.sizes_BT.clamp(min=1) / sequences",
        "share_BT / sequences",
    ),
    ("the constant is ignored", "(sequences * objective.constant)", "sequences"),
    (
        "gated tokens leave the denominator",
        "(a_BT * terms.loss_BT).sum(), {",
        "(a_BT * terms.loss_BT).sum() * mask_BT.sum() / (mask_BT & ~terms.gated_BT).sum().clamp(min=1), {",
    ),
]
ADVANTAGES = [
    ("std divided by n", "(self.size_N - 1).clamp(min=1)).sqrt()", "self.size_N).sqrt()"),
    ("leave-one-out leaves none out", "(groups.sum_N - groups.rewards_N) /", "groups.sum_N /"),
    (
        "sign of A in group_mean",
        "where_informative(groups.rewards_N - groups.mean_N)",
        "where_informative(groups.mean_N - groups.rewards_N)",
    ),
    (
        "equal rewards are not left alone",
        "return torch.where(self._informative_N, advantages_N, 0.0)",
        "return advantages_N",
    ),
    ("groups by position", "torch.unique(group_ids,", "torch.unique_consecutive(group_ids,"),
    ("NaN rewards are let through", "if not bool(torch.isfinite(rewards).all())", "if False"),
]
PRESETS = [
    ("dapo with ppo's clip", '(hi=1.28)),\n        ),\n        "ppo"', '()),\n        ),\n        "ppo"'),
    ("opsm against the proximal policy", 'hi=0.02, p="current"', 'hi=0.02, p="proximal"'),
    (
        "a flipped aspo",
        "positive=Inverse(hi=3.0), negative=Clamp(hi=3.0)",
        "positive=Clamp(), negative=Inverse(hi=3.0)",
    ),
    ("dppo_tv against the proximal policy", 'lo=-0.2, hi=0.2, p="current"', "lo=-0.2, hi=0.2"),
    ("luspo clips as gspo", "Clipped(lo=1 - 2e-3, hi=1 + 2.5e-3)", "Clipped(lo=1 - 3e-4, hi=1 + 4e-4)"),
    (
        "one kernel of vespo for both signs",
        "negative=Gamma(shape=3.0, rate=2.0)",
        "negative=Gamma(shape=2.0, rate=3.0)",
    ),
]

MUTATIONS = [
    Mutation(name, file, old, new)
    for file, found in (("loss.py", LOSS), ("advantages.py", ADVANTAGES), ("presets.py", PRESETS))
    for name, old, new in found
]
