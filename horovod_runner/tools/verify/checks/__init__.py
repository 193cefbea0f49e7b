"""The checks by theme: each file has functions of a Case, and the functions that their ranks run.

Ranks and the command line import these modules, so frameworks are imported inside the functions
alone; `resnet50`, which ranks import, is the exception.
"""
