"""Where the model and the optimizer of a rank are: on the rank's device, or offloaded to the host's memory."""

import torch

from asyncrl.errors import Offloaded

HOST = torch.device("cpu")
MODEL = "the model"
OPTIMIZER = "the optimizer"


class Placement:
    """Moves the shards of a rank, and knows which of them are offloaded. The rank's device is `device`."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, device: torch.device) -> None:
        self._model = model
        self._optimizer = optimizer
        self._device = device
        self._offloaded: frozenset[str] = frozenset()

    def load(self) -> None:
        """Moves the model and the optimizer to the device, and frees the gradients."""
        move_model(self._model, self._device)
        move_optimizer(self._optimizer, self._device)
        self._offloaded = frozenset()

    def offload_optimizer(self) -> None:
        """Moves the optimizer's state to the host's memory, and frees the gradients."""
        move_optimizer(self._optimizer, HOST)
        self._offloaded |= {OPTIMIZER}

    def offload_model(self) -> None:
        """Moves the weights to the host's memory."""
        move_model(self._model, HOST)
        self._offloaded |= {MODEL}

    def check(self, *parts: str) -> None:
        """Raises Offloaded if a part (`MODEL`, `OPTIMIZER`) is offloaded. This also holds on CPUs, where no memory
        moves, so that code that runs there also runs on GPUs."""
        away = sorted(self._offloaded.intersection(parts))
        if away:
            raise Offloaded(f"offloaded: {' and '.join(away)}; call prepare_for_training() to load everything back")


def move_model(model: torch.nn.Module, device: torch.device) -> None:
    """Moves this rank's shards of the weights to `device`."""
    model.to(device)
    _give_back(device)


def move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Moves this rank's shards of the optimizer's state to `device`, and frees the gradients."""
    optimizer.zero_grad(set_to_none=True)
    for state in optimizer.state.values():
        for name, value in state.items():
            # AdamW's step counter is a 0-dimensional tensor that stays where it is: fused AdamW has it on the GPU
            if isinstance(value, torch.Tensor) and value.ndim > 0:
                state[name] = value.to(device)
    _give_back(device)


def _give_back(device: torch.device) -> None:
    """After a move to the CPU, returns the freed GPU memory to other processes instead of torch's cache."""
    if device.type == "cpu":
        torch.cuda.empty_cache()
