"""Compiles the backend of torch.distributed, or what says why it does not compile.

CMake puts this program before the compiler's command. The backend uses headers that torch may
change with any release. Where they do not fit, Horovod is built all the same: the source is
compiled once more with HOROVOD_RUNNER_MISSING, and the module then has the compiler's first error
and nothing else.
"""

import json
import subprocess
import sys
from pathlib import Path

BACKEND = "torch.distributed's backend"  # horovod_build/build.py knows the lines by this

command = sys.argv[1:]
done = subprocess.run(command, check=False, capture_output=True, text=True, errors="replace")
lines = (done.stdout + done.stderr).splitlines()
# Other exit codes are for what the source is not the cause of, such as a compiler that was killed.
if done.returncode != 1:
    print("\n".join(lines), file=sys.stderr)
    sys.exit(done.returncode)
for line in lines:
    print(f"{BACKEND}: {line}", file=sys.stderr)
error = next((line for line in lines if "error" in line), "the compiler failed")
place, colon, message = error.strip().partition(": ")
error = f"{Path(place).name}{colon}{message}"  # without the folder of the build
print(f"{BACKEND} hvd is left out, because it does not compile: {error}", file=sys.stderr)
sys.exit(subprocess.call([*command, f"-DHOROVOD_RUNNER_MISSING={json.dumps(error)}"]))
