"""Optimizers that a user may write: one that a run can use, and some that it cannot."""

from typing import Any

import torch


class Counted(torch.optim.Optimizer):
    """SGD with momentum, whose state also has numbers of Python: the number of steps, and the sum of the rates."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(steps=0, rates=0.0, velocity=torch.zeros_like(parameter))
                state["steps"] += 1
                state["rates"] += group["lr"]
                state["velocity"].mul_(group["momentum"]).add_(parameter.grad)
                self.move(parameter, state, group)

    def move(self, parameter: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        parameter.sub_(state["velocity"] * group["lr"] * (1 + 1 / (1 + state["steps"] + state["rates"])))


class KeepsTheFirstRate(Counted):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.rate = lr

    def move(self, parameter: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        parameter.sub_(state["velocity"] * self.rate)


class CountsInItself(Counted):
    """Its steps become smaller by a count that is not in its state."""

    calls = 0

    def step(self, closure: Any = None) -> None:
        self.calls += 1
        super().step(closure)

    def move(self, parameter: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        parameter.sub_(state["velocity"] * group["lr"] / self.calls)


class ListsInItself(Counted):
    """Its steps become smaller by the length of a list that is not in its state."""

    def move(self, parameter: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        self.rates = [*getattr(self, "rates", []), group["lr"]]
        parameter.sub_(state["velocity"] * group["lr"] / len(self.rates))


class CountsInItsGroup(Counted):
    def move(self, parameter: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        group["calls"] = group.get("calls", 0) + 1
        parameter.sub_(state["velocity"] * group["lr"] / group["calls"])


class ActsLater(Counted):
    """Counts its steps in itself, and begins anew with each tenth step."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.calls = 0

    def step(self, closure: Any = None) -> None:
        self.calls += 1
        super().step(closure)
        if self.calls % 10 == 9:
            for state in self.state.values():
                state["velocity"].zero_()


class ActsLaterByItsGroup(Counted):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group["calls"] = 0

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            group["calls"] += 1


class SharedState(Counted):
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.state["norms"] = {"last": 1.0}


class NotInitialized(torch.optim.Optimizer):
    """Steps like SGD, and does not call the constructor of its base class."""

    def __init__(self, params: Any, lr: float) -> None:
        self.param_groups = [{"params": list(params), "lr": lr}]
        self.state = {}  # type: ignore[assignment]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(self.param_groups[0]["lr"] * parameter.grad)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None


class LocalNorm(Counted):
    """Keeps the norm of the gradient of a rank's own shard as a number."""

    def move(self, parameter: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        super().move(parameter, state, group)
        gradient = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
        state["norm"] = float(gradient.norm())


class MuchLater(Counted):
    """Makes a part of its state in the third step, which is after all steps that are tried."""

    def move(self, parameter: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        super().move(parameter, state, group)
        if state["steps"] == 3:
            state["average"] = parameter.detach().clone()


class Late(Counted):
    """Makes a part of its state in the second step."""

    def move(self, parameter: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        super().move(parameter, state, group)
        if state["steps"] == 2:
            state["average"] = parameter.clone()


class Half(Counted):
    """Keeps its state in half the precision."""

    def move(self, parameter: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        super().move(parameter, state, group)
        state["low"] = state["velocity"].bfloat16()


class Listed(Counted):
    def move(self, parameter: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        super().move(parameter, state, group)
        state["rates_so_far"] = [group["lr"]]


class Still(Counted):
    def move(self, parameter: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        pass


class Local(Counted):
    """Keeps a plain copy of a rank's own shard."""

    def move(self, parameter: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        super().move(parameter, state, group)
        own = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        state["shard"] = own.clone()


def first_only(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(params[:1], lr=lr)


def no_optimizer(params: Any, lr: float) -> float:
    return lr


def broken(params: Any, lr: float) -> torch.optim.Optimizer:
    raise ValueError("no such rate")


def with_closure(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params, lr=lr)
