"""Folders of files that users name: on a disk, on a mounted store, or at a URL of fsspec.

All files are written from their start to their end. May import errors.
"""
