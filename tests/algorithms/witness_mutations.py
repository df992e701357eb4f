"""Deliberate breaks of the witness's formulas, and of the code that they are compared with. The tests in tests/witness
must catch each of them: they compare the two sides."""

OF_WITNESS = [
    ("objective", "a wider clip", 'ratio > surrogate["hi"]', 'ratio > 1.01 * surrogate["hi"]'),
    ("objective", "GSPO's gradient of its own token", "[slope / size for slope in slopes], True", "slopes, False"),
    ("objective", "α and 1 − α swapped", "(1 - 1 / age)", "(1 / age)"),
    ("objective", "prompts are not averaged", '"prompt_mean": prompts *', '"prompt_mean":'),
    ("objective", "bad rows are imitated", "elif sample.reward > 0:", "else:"),
    ("objective", "a pool of the first token", '"min": min', '"min": lambda values: values[0]'),
    ("advantages", "leave-one-out leaves none out", "fmean([rewards[m] for m in group if m != n])", "fmean(own)"),
    ("advantages", "V-trace is not discounted", "+ gamma * apart)", "+ apart)"),
    ("advantages", "all deviations divide by n", 'count - 1 if axes["divisor"] == "n-1" else count', "count"),
    ("advantages", "whitened tokens count once", 'if axes["whiten"] == "tokens" else 1.0', "* 0 + 1.0"),
    ("objective", "another hash", "(15, 0x735A2D97)", "(14, 0x735A2D97)"),
    ("objective", "all tokens have a penalty", 'are_chosen(penalty["tokens"], columns)', "[True] * len(sample)"),
    ("bounds", "one token more is chosen", "max(1, int(", "1 + max(1, int("),
    ("optimizer", "no correction of the second moment", "second / (1 - second_decay**t)", "second"),
    ("optimizer", "a warm-up from 0", "peak * (step + 1) /", "peak * step /"),
    ("bounds", "a pull where the share is whole", 'penalty["beta"] * (1 - share)', 'penalty["beta"] * share'),
    ("bounds", "the mean k2 without its half", "(p - q) ** 2 / 2", "(p - q) ** 2"),
    (
        "step",
        "stale tokens are trained",
        "by_group[each.group] += each.tokens - each.stale",
        "by_group[each.group] += each.tokens",
    ),
    ("step", "rewards are compared in float64", "float(np.float32(reward))", "reward"),
    ("objective", "the rest of the sampler is left out", "alpha = rest_q / rest_p * w(", "alpha = 0.0 * w("),
    (
        "objective",
        "the centering does not follow the advantage",
        "averaging[t] * sample.advantages[t] for",
        "averaging[t] for",
    ),
    ("judge", "samples are not counted", ", abs(sequences - expected.sequences))", ", 0)"),
]
"""Module of asyncrl/witness, name, text that occurs once in the module, text that replaces it."""

OF_PRODUCT = [
    (
        "algorithms/token_terms.py",
        "a wider clip",
        "u_BT.clamp(surrogate.lo, surrogate.hi)",
        "u_BT.clamp(surrogate.lo, 1.01 * surrogate.hi)",
    ),
    (
        "algorithms/token_terms.py",
        "a weight of the token",
        "fixed[weight.q], weight.pool)",
        'fixed[weight.q], "token")',
    ),
    (
        "algorithms/loss.py",
        "no mean over a sequence",
        'share_BT / _divisor(segments.pool(token_BT, "sum")) / sequences',
        "share_BT / sequences",
    ),
    ("algorithms/shares.py", "prompts are not averaged", "1 / (groups * count)", "1 / count"),
    (
        "algorithms/calibration.py",
        "a pull where the share is whole",
        "penalty.beta * (1 - share)",
        "penalty.beta * share",
    ),
    (
        "algorithms/advantages.py",
        "leave-one-out leaves none out",
        "(groups.sum(rewards_N) - rewards_N) /",
        "groups.sum(rewards_N) /",
    ),
    (
        "algorithms/advantages.py",
        "the batch's std of the centred rewards",
        "(rewards_N - rewards_N.mean()).square()",
        "(rewards_N - groups.mean(rewards_N)).square()",
    ),
    ("algorithms/returns.py", "returns are not discounted", "torch.full_like(steps.rewards_BS, gamma)", "gamma**0"),
    (
        "algorithms/filters.py",
        "the buffer begins too late",
        "(config.generator.max_completion_tokens - buffer_tokens)",
        "config.generator.max_completion_tokens",
    ),
    ("algorithms/filters.py", "truncated samples are kept", 'config.algorithm.overlong == "mask"', "False"),
    ("ranks/schedule.py", "a warm-up from 0", "* (step + 1) / section", "* step / section"),
    (
        "ranks/schedule.py",
        "the fall ends late",
        "total_steps - 1 - section.warmup_steps",
        "total_steps - section.warmup_steps",
    ),
]
"""File in asyncrl, name, text that occurs once in the file, text that replaces it."""
