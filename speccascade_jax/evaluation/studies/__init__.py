"""Studies that need more than one sweep: calibration, surveys, profiles and Spec-Bench."""
