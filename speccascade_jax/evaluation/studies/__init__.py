"""Studies that are more than one sweep: calibration, surveys, profiles, Spec-Bench."""
