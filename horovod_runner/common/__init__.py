"""What all rooms share: options, limits, clocks, numbers, texts, files, Spark sessions."""
