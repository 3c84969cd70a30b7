"""Gradient communication hooks: functions that take the plain average's place, bucket by bucket."""
