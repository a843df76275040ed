"""What `lowtide demo` shows: the usual examples of checkpointing, plain, with the usual tool and with Lowtide.

`contest.py` what an example is · `turns.py` how it is measured · `equality.py` how gradients are compared · `paper.py`,
`spiking_torch.py`, `spiking_jax.py`, `spiking_brainstate.py`, `segments.py`, `heavy.py` the examples · `tensors.py`,
`programs.py` bytes in PyTorch and in JAX · `tables.py`, `index.py`, `show.py` what is printed and written.
"""

from lowtide.demo.contest import ResultRow
from lowtide.demo.paper import vgg16
from lowtide.demo.show import NAMES, run

__all__ = ["NAMES", "ResultRow", "run", "vgg16"]
