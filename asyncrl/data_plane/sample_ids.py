"""The names of rows: sample i of a group is `<group>.<attempt>_g<i>`."""


def group_of(sample_id: str) -> str:
    """Returns the group of a sample: `7.0` for `7.0_g3`. A sample id of another form is a group of its own.

    >>> group_of("7.0_g3")
    '7.0'
    """
    group, _, number = sample_id.rpartition("_g")
    return group if group and number.isdecimal() else sample_id


def samples_of(group: str, *, count: int) -> list[str]:
    """Returns the ids of a group's samples.

    >>> samples_of("7.0", count=2)
    ['7.0_g0', '7.0_g1']
    """
    return [f"{group}_g{i}" for i in range(count)]
