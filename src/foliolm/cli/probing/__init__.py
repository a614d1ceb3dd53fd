"""The measurements behind ``foliolm probe``."""
