"""Builds Horovod: plans the build, patches Horovod's source, compiles the wheel.

May import host, common and errors.
"""
