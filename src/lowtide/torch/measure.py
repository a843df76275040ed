"""How many bytes of tensors a piece of code holds at its worst moment.

    with lt.measure.peak() as memory:
        loss = train_step()
    print(memory.peak, memory.now)

What is seen and what is not is told in `lowtide.torch.memory.tracker`, which does the work.
"""

from lowtide.torch.memory.tracker import Memory, peak, storage_bytes, watching

__all__ = ["Memory", "peak", "storage_bytes", "watching"]
__dir__ = sorted(__all__).copy  # what `dir` and tab completion show
