"""Adds the program for NVIDIA GPUs to a wheel with the program grpo for CPUs.

    python3 add_cuda.py WHEEL PROGRAM

The command grpo of the wheel becomes docker/grpo, which starts grpo-cuda or grpo-cpu. The wheel is replaced.
"""

import base64
import hashlib
import sys
import zipfile
from pathlib import Path

LAUNCHER = Path(__file__).resolve().parents[2] / "docker/grpo"


def record_line(name, data):
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}\n"


def main():
    wheel, program = Path(sys.argv[1]), Path(sys.argv[2])
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    record = next(name for name in files if name.endswith(".dist-info/RECORD"))
    scripts = [name for name in files if name.endswith(".data/scripts/grpo")]
    if len(scripts) != 1:
        sys.exit(f"{wheel}: {len(scripts)} files named .data/scripts/grpo, must be one: a wheel of one program")
    grpo = scripts[0]
    files[f"{grpo}-cpu"] = files[grpo]
    files[f"{grpo}-cuda"] = program.read_bytes()
    files[grpo] = LAUNCHER.read_bytes()
    del files[record]
    lines = [record_line(name, data) for name, data in files.items()]
    files[record] = "".join([*lines, f"{record},,\n"]).encode()

    partial = wheel.with_suffix(".partial")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            # The time of a zip file begins in 1980; equal programs make equal wheels.
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = (0o100755 if name.startswith(grpo) else 0o100644) << 16
            archive.writestr(info, data)
    partial.replace(wheel)


if __name__ == "__main__":
    main()
