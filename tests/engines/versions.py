"""The versions of the engines. What is built or downloaded for one is cached by its version."""

HADOOP = "3.5.0"
