"""What `lowtide demo` shows: the usual examples of checkpointing, plain, with the usual tool and with Lowtide.

In: a console, a folder and the names of examples. Out: tables, a report page and a figure for each example, an
`index.html`, and the rows as values.

    contest.py    what an example consists of, and what is measured of it
    turns.py      measures an example: gradients, bytes and time, the tools taking turns
    equality.py   compares gradients with the plain ones
    paper.py, spiking_torch.py, spiking_jax.py, spiking_brainstate.py, segments.py, heavy.py   the examples
    tensors.py, programs.py       bytes in PyTorch and in JAX
    show.py, tables.py, index.py  runs everything; what is printed; the page that links all others

It may import the front ends, the report and the planners. Only the examples import frameworks, each when it is run, so
that those whose packages are missing are skipped.
"""

from lowtide.demo.contest import ResultRow
from lowtide.demo.paper import vgg16
from lowtide.demo.show import NAMES, run

__all__ = ["NAMES", "ResultRow", "run", "vgg16"]
