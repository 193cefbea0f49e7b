"""`horovod-runner verify`: runs the claims of docs/howto/gpu.md as checks, and reports them.

    session   runs the checks one after another, each in a child process with a time limit
      child     the child process: calls a check's function, and writes its readings to a file
        checks/   the checks by theme; their ranks run functions of the same modules

Everything that decides whether a reading is good is a function of plain figures, which tests give
it. Nothing here imports a framework outside the functions that run in a child or a rank. May import
all rooms below; the command line imports it.
"""
