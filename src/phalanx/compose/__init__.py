"""Phalanx with its neighbours: one file per foreign subsystem, imported where it is used."""
