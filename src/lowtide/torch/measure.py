"""The most bytes of tensors that a piece of code holds at any moment.

    with lt.measure.peak() as memory:
        loss = train_step()
    print(memory.peak, memory.now)

`lowtide.torch.memory.tracker`, which does the work, describes what is counted and what is not.
"""

from lowtide.torch.memory.tracker import Memory, peak, storage_bytes, watching

__all__ = ["Memory", "peak", "storage_bytes", "watching"]
__dir__ = sorted(__all__).copy  # what `dir` and tab completion show
