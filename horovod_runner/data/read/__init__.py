"""Where rows come from: readers of Parquet, Delta, Petastorm, tables and DataFrames.

A reader knows its columns and row counts on the driver, travels to the ranks by pickle, and gives
packed rows there. May import `data.pack`, `common`, `host` and `errors`. Must not import
`data.feed`, `worker`, or a training framework.
"""
