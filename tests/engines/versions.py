"""The versions of the engines. What is built or downloaded for one is cached by its version."""

DOCKER_COMPOSE = "2.40.3"
HADOOP = "3.5.0"
KUBERNETES = "1.34.4"
# The newest that know the Spark of `.venv-petastorm`. Neither knows Spark 4.3 yet.
DELTA = "3.3.3"
ICEBERG = "1.12.0"
