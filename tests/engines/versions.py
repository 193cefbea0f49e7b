"""The versions of the engines. What is built or downloaded for one is cached by its version."""

KUBERNETES = "1.34.4"
