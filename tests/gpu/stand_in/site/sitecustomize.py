"""Python loads this at its start: in the ranks that a program starts, too."""

import os

if "STAND_IN_DEVICES" in os.environ:
    import stand_in_torch

    stand_in_torch.set_up(values="STAND_IN_VALUES" in os.environ)
