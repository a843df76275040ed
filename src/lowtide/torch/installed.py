"""The torch that is installed: that there is one, whether its version was tested, and whether it has what is needed.

Imported before all else. Some of what Lowtide does, torch has no public way to ask for: `PRIVATE` lists every name of
torch that is not public and is used anywhere in this package, so that a torch without one of them is refused here, by
name, and not in the middle of a backward. A test compares the list with the source. Attributes of objects, such as a
storage's `_cdata`, are not in it.
"""

from __future__ import annotations

from functools import reduce
from importlib import import_module

from lowtide.errors import MissingPackageError
from lowtide.packages import TESTED, check_version, needed_for

with needed_for("lowtide.torch"):
    import torch

PRIVATE = {
    # saved tensors: hooks at the cost of a call, and whether they are allowed
    "torch._C._autograd": (
        "_get_sequence_nr",
        "_pop_saved_tensors_default_hooks",
        "_push_saved_tensors_default_hooks",
        "_saved_tensors_hooks_is_enabled",
        "_top_saved_tensors_default_hooks",
    ),
    # whether a transform, a trace, a fake mode or a backward is at work; grad mode at the cost of a call
    "torch._C._functorch": ("peek_interpreter_stack",),
    "torch._C._dynamo": ("eval_frame",),
    "torch._C": (
        "_AutoDispatchBelowADInplaceOrView",
        "_DisableAutocast",
        "DisableTorchFunctionSubclass",
        "_EnableTorchFunction",
        "_current_autograd_node",
        "_current_graph_task_id",
        "_disabled_torch_dispatch_impl",
        "_get_dispatch_mode",
        "_is_torch_function_enabled",
        "_is_tracing",
        "_len_torch_function_stack",
        "_set_grad_enabled",
        "_storage_Use_Count",
        # which kernels attention may use, all of them together
        "_get_cudnn_sdp_enabled",
        "_get_flash_sdp_enabled",
        "_get_math_sdp_enabled",
        "_get_mem_efficient_sdp_enabled",
        "_get_overrideable_sdp_enabled",
        "_get_sdp_priority_order",
        "_set_sdp_priority_order",
        "_set_sdp_use_cudnn",
        "_set_sdp_use_flash",
        "_set_sdp_use_math",
        "_set_sdp_use_mem_efficient",
        "_set_sdp_use_overrideable",
    ),
    "torch._C._TorchDispatchModeKey": ("FAKE",),
    "torch.autograd.Variable._execution_engine": ("queue_callback",),
    "torch.autograd.graph": ("_engine_run_backward",),
    "torch.nn.modules.module": ("_global_forward_pre_hooks",),
    "torch.optim.optimizer": ("_foreach_supported_types",),
    "torch.Tensor": ("_values",),
    # documented nowhere, and used by everybody
    "torch._subclasses.fake_tensor": (
        "DataDependentOutputException",
        "DynamicOutputShapeException",
        "FakeTensor",
        "FakeTensorMode",
        "UnsupportedFakeTensorException",
        "UnsupportedOperatorException",
        "unset_fake_temporarily",
    ),
    "torch.ops.aten._local_scalar_dense": ("default",),
    "torch.utils._python_dispatch": ("TorchDispatchMode", "_disable_current_modes"),
    "torch.utils._pytree": ("SUPPORTED_NODES", "_get_node_type", "tree_flatten", "tree_leaves", "tree_map"),
}


def lacking() -> list[str]:
    """The names that this torch does not have."""
    return [f"{home}.{name}" for home, names in PRIVATE.items() for name in names if not _has(home, name)]


def _has(home: str, name: str) -> bool:
    """Whether a module, or an object in one, has this name."""
    try:
        return hasattr(import_module(home), name)
    except ImportError:  # `home` is not a module, but an object in one
        try:
            return hasattr(reduce(getattr, home.split(".")[1:], torch), name)
        except AttributeError:
            return False


def refuse_lacking() -> None:
    """Refuse a torch that lacks a name that Lowtide needs."""
    if missing := lacking():
        raise MissingPackageError(
            f"lowtide.torch needs names that torch {torch.__version__} does not have: {', '.join(missing)}. It is "
            f'tested with torch {TESTED["torch"]}: pip install "torch=={TESTED["torch"]}.*"',
            name="torch",
        )


check_version(torch)
refuse_lacking()
