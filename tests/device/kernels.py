"""Operations that torch asks every accelerator for, and that the CPU does not have: cells of recurrent layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def _summed(*terms: Tensor | None) -> Tensor:
    first, *others = [term for term in terms if term is not None]
    for other in others:
        first = first + other
    return first


def lstm_cell(
    given: Tensor, hidden: Tensor, cx: Tensor, input_bias: Tensor | None = None, hidden_bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The state and the cell after a step, and the gates, which the backward needs."""
    gates = _summed(given, hidden, input_bias, hidden_bias).chunk(4, 1)
    i, f, g, o = gates[0].sigmoid(), gates[1].sigmoid(), gates[2].tanh(), gates[3].sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, gates: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of the gates, the cell and the bias."""
    i, f, g, o = gates.chunk(4, 1)
    tanh = cy.tanh()
    hy = torch.zeros_like(cy) if grad_hy is None else grad_hy
    cell = _summed(hy * o * (1 - tanh * tanh), grad_cy)
    parts = (cell * g * i * (1 - i), cell * cx * f * (1 - f), cell * i * (1 - g * g), hy * tanh * o * (1 - o))
    grad = torch.cat(parts, 1)
    return grad, cell * f, grad.sum(0) if has_bias else None


def gru_cell(
    given: Tensor, hidden: Tensor, hx: Tensor, input_bias: Tensor | None = None, hidden_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The state after a step, and what the backward needs."""
    of_input, of_hidden = _summed(given, input_bias).chunk(3, 1), _summed(hidden, hidden_bias).chunk(3, 1)
    r, z = (of_input[0] + of_hidden[0]).sigmoid(), (of_input[1] + of_hidden[1]).sigmoid()
    n = (of_input[2] + r * of_hidden[2]).tanh()
    return n + z * (hx - n), torch.cat([r, z, n, hx, of_hidden[2]], 1)


def gru_cell_backward(
    grad_hy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients of both kinds of gates, the state and the biases."""
    r, z, n, hx, hn = workspace.chunk(5, 1)
    new = grad_hy * (1 - z) * (1 - n * n)
    update, reset = grad_hy * (hx - n) * z * (1 - z), new * hn * r * (1 - r)
    of_input, of_hidden = torch.cat([reset, update, new], 1), torch.cat([reset, update, new * r], 1)
    biases = (of_input.sum(0), of_hidden.sum(0)) if has_bias else (None, None)
    return of_input, of_hidden, grad_hy * z, *biases


def register() -> None:
    """Make them the device's own."""
    kernels: dict[str, Callable[..., object]] = {
        "_thnn_fused_lstm_cell": lstm_cell,
        "_thnn_fused_lstm_cell_backward_impl": lstm_cell_backward,
        "_thnn_fused_gru_cell": gru_cell,
        "_thnn_fused_gru_cell_backward": gru_cell_backward,
    }
    for name, kernel in kernels.items():
        torch.library.impl(f"aten::{name}", "PrivateUse1")(kernel)
