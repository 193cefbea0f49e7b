"""Rows on disk: cells become numbers, and numbers become memory-mapped matrices.

The columns and their types, decoders for images and NumPy cells, the layout of a packed dataset,
and the store that packs and gathers. May import `errors`, `common` and `host`. Must not import
`data.read` (where rows come from), `data.feed` (who gathers them), or a framework.
"""
