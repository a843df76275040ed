"""The torch that is installed: that there is one, and whether its version was tested. Imported before all else."""

from __future__ import annotations

from lowtide.packages import check_version, needed_for

with needed_for("lowtide.torch"):
    import torch

check_version(torch)
