"""What all rooms share: options, limits, clocks, numbers, text for people, files, Spark sessions."""
