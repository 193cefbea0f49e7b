"""The checks by theme: each file has the functions of its checks, and those that their ranks run.

Ranks and the command line import these modules, so frameworks are imported inside the functions
alone; `resnet50`, which ranks import, is the exception.
"""
