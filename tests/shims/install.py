"""
Prepares a virtual environment for tests on a machine without CUDA and without a system FFmpeg.

Run with the environment's Python. Installs the torchvision shim, and links PyAV's FFmpeg libraries under the plain
names that torchcodec loads. Prints the folder, which belongs on `LD_LIBRARY_PATH`.
"""

import re
import shutil
import sys
import sysconfig
from pathlib import Path


site = Path(sysconfig.get_path("purelib"))
shutil.copy(Path(__file__).with_name("torchvision_cpu.py"), site / "_torchvision_cpu.py")
(site / "_torchvision_cpu.pth").write_text("import _torchvision_cpu\n")

folder = Path(sys.prefix) / "ffmpeg"
folder.mkdir(exist_ok=True)
for library in (site / "av.libs").glob("*.so.*"):
    # torchcodec needs libavutil.so.60; PyAV ships libavutil-<hash>.so.60.8.100, and its libraries link to that name
    plain = re.sub(r"-[0-9a-f]{8}(?=\.so)", "", library.name)
    for name in (library.name, plain, re.sub(r"(\.so\.\d+).*", r"\1", plain)):
        link = folder / name
        if not link.exists():
            link.symlink_to(library)
print(folder)
