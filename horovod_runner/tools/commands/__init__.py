"""The `horovod-runner` command: run, ps, top, stop, report, install and doctor.

Files here read the command line, call the public API and print. They may import every other
package; no other package may import them.
"""
