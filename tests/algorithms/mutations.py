"""Deliberate breaks of the objective. `run_mutations.py` checks that the tests of this folder catch each of them, and
that the tests of the witness catch those of `witness_mutations.py`.

Each entry is (name of the break, file in asyncrl, text that occurs exactly once in the file, text that replaces it,
folder of the tests).
"""

from typing import NamedTuple

from witness_mutations import OF_PRODUCT, OF_WITNESS


class Mutation(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    tests: str = "algorithms"


LOSS = [
    ("gradients add up in half precision", "next_token_logprobs = wide(next_token_logprobs)", "pass"),
    ("half precision is pooled", "if is_half(columns[name].dtype):", "if False:"),
    ("α and 1 − α swapped", "1 - 1 / staleness.clamp(min=1)", "1 / staleness.clamp(min=1)"),
    (
        "fresh tokens take the behaviour policy",
        "torch.where(staleness > 0, between, current)",
        "torch.where(staleness > 0, between, behaviour)",
    ),
    (
        "masked samples are trained",
        'data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(1)',
        'data["token_mask"][:, 1:]',
    ),
    ("advantages of the token before", 'data["advantages"][:, 1:]', 'data["advantages"][:, :-1]'),
    ("good rows become less likely", "loss = loss - penalty.beta *", "loss = loss + penalty.beta *"),
    (
        "masked tokens are imitated",
        "lp_BT = torch.where(segments.mask_BT, next_token_logprobs, 0.0)",
        "lp_BT = next_token_logprobs",
    ),
    ("tokens counted in the micro-batch", "return share_BT / tokens", "return share_BT / share_BT.sum().clamp(min=1)"),
    (
        "sequences counted in the micro-batch",
        '_divisor(segments.pool(token_BT, "sum")) / sequences',
        '_divisor(segments.pool(token_BT, "sum")) / len(share_BT)',
    ),
    (
        "the sequence mean does not divide by length",
        'share_BT / _divisor(segments.pool(token_BT, "sum")) / sequences',
        "share_BT / sequences",
    ),
    ("the constant is ignored", "(sequences * objective.constant)", "sequences"),
    (
        "gated tokens leave the denominator",
        "loss = (a_BT * terms.loss_BT).sum()",
        "loss = (a_BT * terms.loss_BT).sum() * segments.mask_BT.sum() / "
        "(segments.mask_BT & ~terms.gated_BT).sum().clamp(min=1)",
    ),
]
TOKEN_TERMS = [
    (
        "the centering is not multiplied by the advantage",
        "push_BT + adv_BT * inside(centering_BT)",
        "push_BT + inside(centering_BT)",
    ),
    (
        "the centering leaves out the rest",
        "torch.where(has_rest.unsqueeze(-1), torch",
        "torch.where(has_rest.unsqueeze(-1) & False, torch",
    ),
    ("the centering does not follow the kernel", "(p.clamp(lo * q, hi * q) - alpha * p)", "(q - alpha * p)"),
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
    (
        "u against the proximal policy always",
        "anchor_BT = fixed[objective.anchor if",
        'anchor_BT = fixed["proximal" if',
    ),
    (
        "half precision is not widened",
        "torch.where(mask_BT, wide(values_BT), 0.0)",
        "torch.where(mask_BT, values_BT, 0.0)",
    ),
    (
        "the pooled ratio of GSPO-token carries gradient",
        'segments.pool(log_u_BT, "mean").detach() + (lp_BT',
        'segments.pool(log_u_BT, "mean") + (lp_BT',
    ),
    (
        "GSPO-token without a gradient",
        "(lp_BT - lp_BT.detach())",
        "(lp_BT - lp_BT).detach()",
    ),
    ("a parabola without |A|", "adv_BT.abs() * (u_BT - 1)", "adv_BT * (u_BT - 1)"),
    ("a parabola of another width", "/ (2 * surrogate.width)", "/ surrogate.width"),
    ("a parabola of an unbounded ratio", "log_u_BT.clamp(max=MAX_FLOAT32_LOG_RATIO / 2).exp()", "log_u_BT.exp()"),
    ("sign of A in the regression", "surrogate.beta * log_u_BT - adv_BT", "surrogate.beta * log_u_BT + adv_BT"),
    ("a regression without β", "surrogate.beta * log_u_BT - adv_BT", "log_u_BT - adv_BT"),
    ("pre-clip on the wrong side", "(adv_BT > 0, above_BT,", "(adv_BT > 0, below_BT,"),
    ("pre-clip on both sides", "log_u_BT.clamp(max=math.log(objective.pre_clip.hi))", "log_u_BT.clamp(-0.4, 0.4)"),
    ("exponents without a limit", "log_u_BT.clamp(max=MAX_FLOAT32_LOG_RATIO).exp()", "log_u_BT.exp()"),
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
    ("moving away inverted", "advantages * log_ratio > 0", "advantages * log_ratio < 0"),
    ("good sequences are gated too", "return advantages < 0", "return advantages < math.inf"),
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
        "(-difference_BT).clamp(max=MAX_FLOAT32_LOG_RATIO).exp() - 1 + difference_BT",
        "difference_BT.clamp(max=MAX_FLOAT32_LOG_RATIO).exp() - 1 - difference_BT",
    ),
    ("k3+ with k3's gradient", "(k3_BT - k2_BT).detach()", "(k3_BT - k2_BT)"),
    (
        "an infinite surrogate through a gate",
        "inside(torch.where(gated_BT, 0.0, push_BT))",
        "inside(push_BT * ~gated_BT)",
    ),
    ("penalties are a push", "push_BT=push_BT,", "push_BT=loss_BT,"),
    ("padding's segment ids are indices", ".long().clamp(min=0)", ".long()"),
    ("entropy is punished", "value_BT = -entropy_BT", "value_BT = entropy_BT"),
    (
        "the correction has no gradient",
        "fixed[penalty.corrected_by]).clamp(max=MAX_FLOAT32_LOG_RATIO).exp()",
        "fixed[penalty.corrected_by]).clamp(max=MAX_FLOAT32_LOG_RATIO).exp().detach()",
    ),
    (
        "masked slots are multiplied, not replaced",
        "return torch.where(mask_BT, wide(values_BT), 0.0)",
        "return wide(values_BT) * mask_BT",
    ),
    ("packed sequences are one", "row_B1 * width + ids_BT)", "row_B1 * width + 0 * ids_BT)"),
    ("a mean over the padded row", "pooled / self.sizes_BT.clamp(min=1)", "pooled / self._shape[1]"),
    ("a mean for a sum", 'if how == "mean" else pooled', "if how else pooled"),
    ("a sum for a mean", 'if how == "mean" else pooled', "if not how else pooled"),
    ("max for min", "limit = math.inf if how", "limit = -math.inf if how"),
    (
        "penalties where there is an advantage only",
        "penalty.beta * inside(",
        "penalty.beta * (adv_BT != 0) * inside(",
    ),
]
SHARES = [
    ("prompt groups weigh by their tokens", "1 / (groups * count)", "1 / sum(counts.by_group.values())"),
    ("prompt groups are not averaged", "1 / (groups * count)", "1 / count"),
    ("every group counts, trained or not", "sum(tokens > 0 for tokens in counts.by_group.values())", "len(ids)"),
    ("bad rows are imitated", '(data["rewards"] > 0).float()', '(data["rewards"] < 0).float()'),
    ("good rows are imitated without a mean", "/ (counts.positive or 1.0)", "/ 1.0"),
    ("masked rows count", '.double() * data["sample_mask"].double().unsqueeze(1)', ".double()"),
    ("a row's first token counts", "weight_BS[:, 0] = 0.0", "pass"),
    ("ranks do not add up", " + other.by_group.get(group, 0.0)", ""),
    ("good tokens of other parts are lost", "positive=self.positive + other.positive", "positive=self.positive"),
]
ADVANTAGES = [
    ("leave-one-out leaves none out", "(groups.sum(rewards_N) - rewards_N) /", "groups.sum(rewards_N) /"),
    (
        "sign of A with a group baseline",
        "rewards_N - _group_baseline(axes, rewards_N, groups, samples)",
        "_group_baseline(axes, rewards_N, groups, samples) - rewards_N",
    ),
    (
        "equal rewards are not left alone",
        "return torch.where(teaches_N, centred_N / _scale(axes, rewards_N, groups, teaches_N), 0.0)",
        "return centred_N / _scale(axes, rewards_N, groups, teaches_N)",
    ),
    ("groups by position", "torch.unique(group_ids_N,", "torch.unique_consecutive(group_ids_N,"),
    ("NaN rewards are let through", "if not bool(torch.isfinite(rewards).all())", "if False"),
    ("NaN components are let through", "*(samples.components or {}).values()", "*()"),
    ("a baseline by length without lengths", "groups.sum(tokens_N * rewards_N)", "groups.sum(rewards_N)"),
    (
        "a baseline by length of empty completions",
        "torch.where(all_N > 0, weighted_N,",
        "torch.where(all_N > -1, weighted_N,",
    ),
    ("sign of ReMax", "return rewards_N - _known(samples.greedy", "return -rewards_N + _known(samples.greedy"),
    (
        "the batch's std of the centred rewards",
        "(rewards_N - rewards_N.mean()).square()",
        "(rewards_N - groups.mean(rewards_N)).square()",
    ),
    (
        "GPG's share upside down",
        "return (teaches_N.sum().double() / count).clamp(min=1 / count)",
        "return count / teaches_N.sum().clamp(min=1)",
    ),
    ("GPG counts no group of one", "teaches_N = varied_N | (raw_N & (rewards_N != 0))", "teaches_N = varied_N"),
    ("GPG counts all", "(teaches_N.sum().double() / count)", "(torch.ones_like(teaches_N).sum() / count)"),
    ("a batch's mean of each group", "step = Groups(torch.zeros_like(samples.group_ids_N))", "step = groups"),
    ("a batch of equal rewards", "torch.where(step.varied(rewards_N),", "torch.where(rewards_N == rewards_N,"),
    ("rewards of 0 are counted", "torch.count_nonzero(rewards_N)", "torch.count_nonzero(rewards_N + 9)"),
    (
        "the others' std about the group's mean",
        "others_N = squares_N - centred_N.square() * size_N / (size_N - 1).clamp(min=1)",
        "others_N = squares_N - centred_N.square()",
    ),
    (
        "the others' std counts the sample",
        "deviation(others_N.clamp(min=0), size_N - 1, axes)",
        "deviation(others_N.clamp(min=0), size_N, axes)",
    ),
    ("equal others are divided by eps", "equal_N = others_N <= ROUNDING * squares_N", "equal_N = others_N < -1"),
    (
        "MaxRL divides by the sum",
        "scale_N = groups.mean(rewards_N) + axes.eps",
        "scale_N = groups.sum(rewards_N) + axes.eps",
    ),
    ("MaxRL without its eps", "scale_N = groups.mean(rewards_N) + axes.eps", "scale_N = groups.mean(rewards_N)"),
    ("a single sample is divided", "return torch.where(size_N > 1, scale_N, 1.0)", "return scale_N"),
    ("every group of one is raw", '& (axes.single == "raw")', "& True"),
    ("no group of one is raw", '& (axes.single == "raw")', "& False"),
    ("components are not weighted", "self._weight(name, samples) * scaled_N", "scaled_N"),
    ("missing weights are let through", "if weights and set(weights) != names", "if False"),
    (
        "the total for every component",
        'dict(_known(samples.components or None, "components"))',
        'dict.fromkeys(_known(samples.components or None, "components"), samples.rewards_N)',
    ),
    (
        "a length penalty that rewards length",
        "rewards_N / (1 + self.axes.length_penalty * relative_N)",
        "rewards_N * (1 + self.axes.length_penalty * relative_N)",
    ),
    (
        "a length penalty of absolute lengths",
        "tokens_N / Groups(samples.group_ids_N).mean(tokens_N).clamp(min=1e-9)",
        "tokens_N",
    ),
    ("negative rewards are let through", "if bool((rewards_N < 0).any())", "if False"),
    (
        "whitened groups of equal rewards",
        "if axes.baseline not in GROUP_BASELINES:\n            return whitened_N",
        "return whitened_N",
    ),
    ("tokens are whitened as samples", 'if axes.whiten == "tokens":', "if False:"),
    ("nothing is whitened", 'if axes.whiten == "none":', "if True:"),
    ("the mean is never kept", "if rule.keep_mean else whitened_N", "if False else whitened_N"),
    ("whitening counts every value once", "(counts_N * centred_N.square()).sum()", "centred_N.square().sum()"),
    (
        "the mean counts every value once",
        "mean = (counts_N * torch.where(counted_N, values_N, 0.0)).sum() / count",
        "mean = inside.mean()",
    ),
    (
        "empty completions are whitened",
        "centred_N = torch.where(counted_N, values_N - mean, 0.0)",
        "centred_N = values_N - mean",
    ),
    (
        "the filter sees plain rewards",
        "return estimator.varied(samples)",
        "return Groups(samples.group_ids_N).varied(samples.rewards_N)",
    ),
    ("one component decides for all", ".values()]).any(0)", ".values()]).all(0)"),
    ("own estimators lose their options", "samples.group_ids_N, **options)", "samples.group_ids_N)"),
    ("own options are not checked", "misfit(signature, *values, **given, **options)", "None"),
]
BASELINES = [
    (
        "maxrl with a group's std",
        '"maxrl": Outcome(baseline="group_mean", scale="group_mean")',
        '"maxrl": Outcome(baseline="group_mean", scale="group_std")',
    ),
    ("gpg counts rewards that are not 0", 'scale="informative_share")', 'scale="nonzero_share")'),
    ("gdpo without its batch", 'scale="group_std", whiten="samples")', 'scale="group_std")'),
    ("gr3 at another α", "length_penalty=0.33", "length_penalty=0.3"),
    (
        "critics whiten samples",
        'whiten: Literal["none", "samples", "tokens"] = "tokens"',
        'whiten: Literal["none", "samples", "tokens"] = "samples"',
    ),
    ("idle options are let through", "        if option in idle:", "        if False:"),
    ("unknown options are let through", "        if option not in known:", "        if False:"),
    (
        "scales of a group without its baseline",
        'if self.scale != "none" and self.baseline not in GROUP_BASELINES',
        "if False",
    ),
    ("a negative eps", "if not 0 <= self.eps < math.inf", "if False"),
    (
        "raw groups of one compare a group",
        'self.baseline in GROUP_BASELINES and self.single == "zero"',
        "self.baseline in GROUP_BASELINES",
    ),
    ("any β of a KL", 'check_positive("kl.beta"', 'print("kl.beta"'),
    ("any γ", "if not 0 < self.gamma <= 1:", "if False:"),
    ("γ has no tokens", "self.kl is not None or self.gamma != 1", "self.kl is not None"),
    ("a KL has no tokens", "self.kl is not None or self.gamma != 1", "self.gamma != 1"),
    (
        "tokens are whitened over samples",
        'found = msgspec.structs.replace(found, whiten="tokens")',
        "pass",
    ),
    ("a whitening of one's own is lost", 'found.by_token and "whiten" not in options', "found.by_token"),
    ("a critic has one advantage a sample", "isinstance(axes, CriticBased) or (isinstance", "(isinstance"),
    (
        "a critic has no KL",
        "axes.kl if isinstance(axes, DiscountedOutcome | CriticBased)",
        "axes.kl if isinstance(axes, DiscountedOutcome)",
    ),
]
PRESETS = [
    (
        "dapo with ppo's clip",
        '(hi=1.28)),\n            baseline="group_norm",\n        ),\n        "ppo"',
        '()),\n            baseline="group_norm",\n        ),\n        "ppo"',
    ),
    ("opsm against the proximal policy", 'hi=0.02, p="current"', 'hi=0.02, p="proximal"'),
    (
        "a flipped aspo",
        "positive=Inverse(hi=3.0), negative=Clamp(hi=3.0)",
        "positive=Clamp(), negative=Inverse(hi=3.0)",
    ),
    (
        "dppo_tv against the proximal policy",
        'lo=-0.2, hi=0.2, p="current", when="moving_away"),),\n            ),\n        ),\n        "dppo_kl"',
        'lo=-0.2, hi=0.2, when="moving_away"),),\n            ),\n        ),\n        "dppo_kl"',
    ),
    (
        "dppo_tv_k2 against the proximal policy",
        'lo=-0.2, hi=0.2, p="current", when="moving_away"),),\n                penalties',
        'lo=-0.2, hi=0.2, when="moving_away"),),\n                penalties',
    ),
    ("luspo clips as gspo", "Clipped(lo=1 - 2e-3, hi=1 + 2.5e-3)", "Clipped(lo=1 - 3e-4, hi=1 + 4e-4)"),
    ("m2po with ten times its budget", "budget=0.02", "budget=0.2"),
    ("opsm a tenth wider", 'hi=0.02, p="current"', 'hi=0.022, p="current"'),
    ("dppo_kl wider", 'stat="binary_kl", hi=0.05', 'stat="binary_kl", hi=0.08'),
    ("flash_reinforce wider", 'stat="binary_kl", pool="mean", hi=3e-3', 'stat="binary_kl", pool="mean", hi=3.2e-3'),
    ("glm5 clips as the default", 'stat="ratio", lo=0.7, hi=6.0', 'stat="ratio", lo=0.5, hi=5.0'),
    (
        "a pull half as strong",
        'Penalty(beta=2e-3, kind="k2", q="behaviour")',
        'Penalty(beta=1e-3, kind="k2", q="behaviour")',
    ),
    ("oapl for tokens", 'level="sequence_sum",\n                aggregation', "aggregation"),
    ("cfpo half as wide", "Quadratic(width=0.2)", "Quadratic(width=0.1)"),
    ("p3o against the reference", 'kind="k3", q="behaviour", ess=True', 'kind="k3", ess=True'),
    ("vapo imitates twice as much", 'Penalty(beta=0.1, kind="positive_nll")', 'Penalty(beta=0.2, kind="positive_nll")'),
    ("vapo's λ of the value", "value_lam=1.0, length_alpha=0.05", "value_lam=0.95, length_alpha=0.05"),
    ("rloo with grpo's baseline", 'baseline="leave_one_out"', 'baseline="group_norm"'),
    ("overrides are shallow", "{key: _replaced(current.get(key), part) for key, part in value.items()}", "value"),
    (
        "one kernel of vespo for both signs",
        "negative=Gamma(shape=3.0, rate=2.0)",
        "negative=Gamma(shape=2.0, rate=3.0)",
    ),
]

RETURNS = [
    ("accumulators stop at masked tokens", "index_BS.flip(1).cummin(dim=1).values.flip(1)", "index_BS"),
    ("returns without the values", "returns_BS=advantages_BS + steps.values_BS", "returns_BS=advantages_BS"),
    ("V-trace carries by ρ", "decay_BS=gamma * c_BS", "decay_BS=gamma * rho_BS"),
    (
        "V-trace weighs the advantages too",
        "advantages_BS = steps.rewards_BS +",
        "advantages_BS = rho_BS * steps.rewards_BS +",
    ),
    ("V-trace's advantages look at the values", "steps.following(targets_BS)", "steps.following(steps.values_BS + 0)"),
    ("the first token is a step", "mask_BS[:, 0] = False", "pass"),
    ("whitening divides by n", '(count - 1 if rule.divisor == "n-1" else count)', "count"),
    ("whitening divides by n − 1", '(count - 1 if rule.divisor == "n-1" else count)', "(count - 1)"),
    ("eps is always added to the std", 'if rule.eps_in == "variance"', "if False"),
    ("eps is always added to the variance", 'if rule.eps_in == "variance"', "if True"),
    ("eps is forgotten", "return variance.sqrt() + rule.eps", "return variance.sqrt()"),
    ("weights are forgotten", "if weights is None else torch.where(mask.bool(), weights.double(), 0.0)", ""),
    ("moments of squared weights", "(counts * inside.square()).sum()", "(counts * inside).square().sum()"),
    ("the mean of tokens is never kept", "whitened + mean * rule.keep_mean", "whitened"),
    ("equal values are divided", "variance > ROUNDING * mean_square", "variance >= 0"),
    (
        "KL of the other direction",
        "difference = logprobs - reference_logprobs",
        "difference = reference_logprobs - logprobs",
    ),
    ("k2 of the reward without its half", "return difference.square() / 2", "return difference.square()"),
    (
        "k3 of the reward without its 1",
        "return (-difference).exp() - 1 + difference",
        "return (-difference).exp() + difference",
    ),
    ("returns are not discounted", "torch.full_like(steps.rewards_BS, gamma)", "torch.ones_like(steps.rewards_BS)"),
]
VALUE_LOSS = [
    ("the value clip is a bonus", "torch.maximum(square_BT", "torch.minimum(square_BT"),
    ("the token mean without its half", "loss = 0.5 * masked_mean(square_BT", "loss = masked_mean(square_BT"),
    ("the sequence mean without its half", "loss = 0.5 * masked_mean(means_BT", "loss = masked_mean(means_BT"),
    (
        "the sequence mean by tokens",
        "means_BT, weight_BT, global_valid_seqs)",
        "means_BT, weight_BT, global_valid_toks)",
    ),
    ("the sequence mean of sums", "square_BT / torch.where(tokens_B1 > 0, tokens_B1, 1)", "square_BT"),
    ("the sequence mean over the width", "torch.where(tokens_B1 > 0, tokens_B1, 1)", "mask_BT.shape[1]"),
    ("the sequence mean by the micro-batch", "weight_BT, global_valid_seqs)", "weight_BT, torch.tensor(len(mask_BT)))"),
    ("a sample mask weighs values", 'data["sample_mask"].unsqueeze(1)) > 0', 'data["sample_mask"].unsqueeze(1)) > 0.6'),
    ("values are clipped about the returns", 'old_BT = inside(data["values"]', 'old_BT = inside(data["returns"]'),
    ("explained variance of the returns", "1 - left / spread", "left / spread"),
]
KERNEL = [
    ("κ does not divide by A", "-slopes / torch.where(pushed, advantages, 1.0)", "-slopes"),
    (
        "signs swapped",
        'mean(f"{name}_positive_ratio", share, advantages > 0)',
        'mean(f"{name}_positive_ratio", share, advantages < 0)',
    ),
    ("tokens without an advantage are silent in buckets", "inside & pushed", "inside"),
    ("tokens without an advantage are pushed", "pushed = advantages != 0", "pushed = advantages > -99"),
]
CALIBRATION = [
    ("the effective share of the proximal policy", 'bounded_ratio("current"', 'bounded_ratio("proximal"'),
    ("a pull where the share is whole", "penalty.beta * (1 - share)", "penalty.beta * share"),
    ("a cap beyond the configured one", "hi=min(kernel.hi, share)", "hi=share"),
    ("penalties are all scaled", "if penalty.ess else penalty", "if share < 1 else penalty"),
    ("the good for the bad", "advantages=tokens.advantages", "advantages=-tokens.advantages"),
    ("the configured bound is forgotten", 'hi=min(gate.hi, numbers[f"gates.{i}"])', 'hi=numbers[f"gates.{i}"]'),
    ("the lower bound is forgotten", "cap_of_share(share, lo=weight.lo)", "cap_of_share(share, lo=0.0)"),
    ("the configured cap is forgotten", 'min(weight.hi, numbers["weight"])', 'numbers["weight"]'),
    ("a cap below 1", 'hi=max(1.0, min(weight.hi, numbers["weight"]))', 'hi=min(weight.hi, numbers["weight"])'),
    ("a covariance about the mean of other log-probs", 'tokens.sources["proximal"], mean)', "tokens.advantages, mean)"),
    ("the whole second moment for k2", "difference.square()[subject] / 2", "difference.square()[subject]"),
]
STEP_STATISTICS = [
    (
        "every rank for itself in a sum",
        "= reduce(torch.tensor([float(each) for each in own], dtype=torch.float64))",
        "= (torch.tensor([float(each) for each in own], dtype=torch.float64))",
    ),
    ("a coarse search", "_GRID, _ROUNDS = 64, 4", "_GRID, _ROUNDS = 64, 1"),
    (
        "every rank for itself in a search",
        "for first, second in reduce(rows).tolist()",
        "for first, second in rows.tolist()",
    ),
    ("every rank for itself in a quantile", "enumerate(reduce(below.double()).tolist())", "enumerate(below.tolist())"),
    ("the next value for a quantile", "if number >= rank)", "if number > rank)"),
    ("one token more is chosen", "- max(1, math.floor(share", "- 1 - max(1, math.floor(share"),
    ("a choice without a token", "int(count) - max(1, math.floor(", "int(count) - max(0, math.floor("),
    ("negative values in the wrong order", "bits ^ _MAGNITUDE, bits)", "bits, bits)"),
    ("a statistic sees no other", "statistics=dict(found)", "statistics={}"),
    ("any values are taken", "if values.ndim != 1 or", "if False and"),
]
DIAGNOSTICS = [
    ("k1 with the wrong sign", "-log_rho.sum(),", "log_rho.sum(),"),
    ("k3 of the absolute", "(rho - 1 - bounded)", "(rho - 1 - bounded.abs())"),
    ("the largest of one sign", "log_rho.abs().max(),", "log_rho.max(),"),
    ("ρ for e^|log ρ|", "bounded.abs().exp()", "bounded.exp()"),
    ("no token reads healthy", "return math.nan", "return 1.0"),
    ("a NaN drops out of the parity", ".abs().nan_to_num(nan=torch.inf)", ".abs().nan_to_num(nan=0.0)"),
    ("the least for the largest", "max(before, value) if", "min(before, value) if"),
    ("the effective share of sums", "first**2 / second", "first / second"),
    ("silence reads healthy", "if second > 0 else 0.0", "if second > 0 else 1.0"),
    ("a maximum is divided", "name: value if _extreme(name) else value / count", "name: value / count"),
]
OBJECTIVE = [
    ("a constant kernel corrects", "if isinstance(surrogate, Weighted):", "if False:"),
    ("the sampler is not read", 'pairs += [("current", "behaviour")] if reads_effective_share(self) else []', "pass"),
    ("idle axes are let through", "if not uses_ratio(self.surrogate):", "if False:"),
    (
        "a level that does nothing",
        'if self.level == "sequence_mean_token" and isinstance(self.surrogate, Weighted):',
        "if False:",
    ),
    ("gates without a bound", "if self.budget is None and self.lo <= least", "if False and self.lo <= least"),
    (
        "any beta",
        'check_positive("a penalty',
        'print("a penalty',
    ),
    (
        "any beta of a regression",
        'check_positive("the beta of a regression',
        'print("the beta of a regression',
    ),
    ("a likelihood against another policy", 'if self.kind == "positive_nll" and (', "if False and ("),
]
OBJECTIVE_PROPERTIES = [
    (
        "a reversed weight corrects",
        'weight.p in trained and weight.q == "behaviour"',
        '"behaviour" in {weight.p, weight.q}',
    ),
    ("a product is bounded", "return multiplied or (weight", "return (weight"),
    ("a regression is a product", " and not isinstance(objective.surrogate, Regression)", ""),
    (
        "an interpolated policy is the current one",
        'if objective.proximal == "interpolated":\n        return []',
        "pass",
    ),
    (
        "pooled gates are not told",
        "for part in (objective.weight, *objective.gates):",
        "for part in (objective.weight,):",
    ),
    (
        "sums of a sequence do not average",
        'objective.level in ("sequence_mean", "sequence_sum")',
        'objective.level == "sequence_sum"',
    ),
    ("kernels average", "not isinstance(objective.surrogate, Reinforce | Weighted)", "True"),
]
CHECKS = [
    (
        "products are said on-policy",
        "is_product(objective) and config.staleness.max_versions > 0",
        "is_product(objective)",
    ),
    ("η without a correction", "config.staleness.max_versions > 0 and not is_corrected", "False and not is_corrected"),
    (
        "token advantages of a sequence",
        "has_token_advantages(advantage) and averages_advantages(objective)",
        "False",
    ),
    ("a second pull to the reference", "if pulls and reward_kl(", "if False and reward_kl("),
    ("any penalty is a second pull", 'part.q == "reference" and part.kind not in', "part.kind not in"),
    ("an entropy is a second pull", 'part.kind not in ("entropy", "positive_nll")', "True"),
    ("components in a run", 'advantage.rewards == "components" and not any(names)', "False"),
    ("greedy rewards in a run", 'if advantage.baseline == "greedy"', "if False"),
    ("penalties below 0", "if advantage.refuses_negative_rewards and", "if False and"),
    ("idle raw groups of one", 'advantage.single == "raw" and group_size > 1', "False"),
    ("a group of one", "advantage.compares_a_group and group_size < 2", "False"),
]
TOKEN_ESTIMATORS = [
    ("the KL is a bonus", "return rewards_BS - kl.beta *", "return rewards_BS + kl.beta *"),
    ("the KL without its β", "rewards_BS - kl.beta * kl_estimate(", "rewards_BS - kl_estimate("),
    (
        "the reference's KL to the policy",
        "kl_estimate(policy_BS, reference_BS,",
        "kl_estimate(reference_BS, policy_BS,",
    ),
    ("the reward at every token", "mask_BS & (left_BS == 1)", "mask_BS"),
    ("the reward at the first trained token", "mask_BS.flip(1).cumsum(1).flip(1)", "mask_BS.cumsum(1)"),
    ("no discount", 'data["token_mask"], gamma=self.gamma)', 'data["token_mask"], gamma=1.0)'),
    ("outcomes are whitened twice", 'msgspec.structs.replace(axes, whiten="none", keep_mean=False)', "axes"),
    ("a part of a sample keeps its mean", 'whiten="none", keep_mean=False', 'whiten="none"'),
    ("the log-probs of a KL are not read", "(() if self.kl is None else KL_COLUMNS)", "()"),
    ("γ alone is forgotten", "DiscountedOutcome) and axes.by_token", "DiscountedOutcome) and axes.kl"),
    ("every rank is whitened alone", "moments = add_up(moments)", "add_up(moments)"),
    ("samples weigh as tokens", 'if rule.whiten == "samples":', "if False:"),
    ("whitening where none is wanted", 'if rule.whiten == "none":', "if False:"),
    ("a shape of its own", "if column_BS.shape != mask_BS.shape:", "if False:"),
]
AXIS_ERRORS = [
    ("the fields of any kind", "kind.tag_field is None or value[kind.tag_field] == kind.tag", "True"),
    ("no choices are named", "if choices:", "if False:"),
    ("the choices of an enumeration are not named", "case EnumType(cls=cls):", "case EnumType(cls=cls) if False:"),
    ("infinity is not explained", 'startswith("inf")', 'startswith("?")'),
]
OWN_LOSS = [
    ("signatures are not checked", "if problem := _call_problem(loss):", "if problem := None:"),
    ("a loss of log-probs is called with logits", "if kind == LossInputType.LOGPROB:", "if False:"),
    ("any object is a loss", "if not _is_loss(loss):", "if False:"),
]

MUTATIONS = [
    Mutation(name, f"algorithms/{file}", old, new)
    for file, found in (
        ("loss.py", LOSS),
        ("token_terms.py", TOKEN_TERMS),
        ("shares.py", SHARES),
        ("advantages.py", ADVANTAGES),
        ("baselines.py", BASELINES),
        ("presets.py", PRESETS),
        ("returns.py", RETURNS),
        ("value_loss.py", VALUE_LOSS),
        ("kernel.py", KERNEL),
        ("calibration.py", CALIBRATION),
        ("step_statistics.py", STEP_STATISTICS),
        ("diagnostics.py", DIAGNOSTICS),
        ("objective.py", OBJECTIVE),
        ("objective.py", OBJECTIVE_PROPERTIES),
        ("checks.py", CHECKS),
        ("token_estimators.py", TOKEN_ESTIMATORS),
        ("axis_errors.py", AXIS_ERRORS),
        ("loss.py", OWN_LOSS),
    )
    for name, old, new in found
]
MUTATIONS += [
    Mutation(f"witness, its {module}: {name}", f"witness/{module}.py", old, new, "witness")
    for module, name, old, new in OF_WITNESS
]
MUTATIONS += [Mutation(f"witness, product: {name}", file, old, new, "witness") for file, name, old, new in OF_PRODUCT]
