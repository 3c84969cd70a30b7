"""Python loads this at its start: in the ranks that a program starts, too."""

import os

if "STAND_IN_DEVICES" in os.environ:
    import stand_in_torch

    stand_in_torch.set_up(values="STAND_IN_VALUES" in os.environ)
    if "STAND_IN_RANKS_ON_NCCL" in os.environ:
        import ranks_on_nccl

        ranks_on_nccl.set_up()
