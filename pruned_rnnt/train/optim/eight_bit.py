"""AdamW with moments of eight bits (Dettmers et al. 2021, arXiv 2110.02861), by bitsandbytes.

Each block of 256 moments has a scale of its own. Parameters of less than 4096 elements have moments
in float32. Importing this module needs bitsandbytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from bitsandbytes.optim import AdamW8bit as _AdamW8bit

from pruned_rnnt.train.optim.conditional import check_saved_state, loss_of


class AdamW8bit(_AdamW8bit):  # type: ignore[misc]
    """bitsandbytes' optimiser, whose moments are allocated at once and saved as plain tensors.

    Args:
        groups: of parameters, with their weight_decay.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps)
        for group_index, group in enumerate(self.param_groups):
            for index, parameter in enumerate(group["params"]):
                self.init_state(group, parameter, group_index, index)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """As the base class, which waits for the device after each parameter."""
        loss = loss_of(closure)
        for group_index, group in enumerate(self.param_groups):
            for index, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    self.update_step(group, parameter, group_index, index)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The state of any optimiser of torch; the base class nests it, for FSDP."""
        state: dict[str, Any] = torch.optim.Optimizer.state_dict(self)
        return state

    def load_state_dict(self, state_dict: dict[str, Any], move_to_device: bool = True) -> None:
        """Load the moments.

        Raises:
            ValueError: the state is that of another optimiser or of other groups of parameters.
        """
        check_saved_state(state_dict, "state1")
        super().load_state_dict(state_dict, move_to_device)
        self.to_gpu()
        for state in self.state.values():
            # One table for all parameters, as before.
            if "qmap1" in state:
                state["qmap1"] = self.name2qmap["dynamic"]
                state["qmap2"] = self.name2qmap["udynamic"]
