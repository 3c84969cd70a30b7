"""Phalanx: data-parallel training for PyTorch in which the ranks hold the line."""
