"""Random small training programs, and a judge of what their ranks learn."""
