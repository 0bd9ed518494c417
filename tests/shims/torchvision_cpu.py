"""Lets the torchvision wheel of PyPI (linked against CUDA) be imported next to a CPU build of torch.

Its compiled operators cannot load there, which torchvision tolerates, except that it registers fake kernels for two of
them. Declaring these two schemas first is enough for its Python parts, which is all that image and video processors
use. `make` installs this file into the virtual environment with a `.pth` file; it does nothing on a CUDA build.
"""

import sys


class _DeclareSchemas:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "torchvision":
            return
        sys.meta_path.remove(_DeclareSchemas)
        import torch

        if not torch.version.cuda and not torch.version.hip:
            global _library
            _library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                _library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return


sys.meta_path.insert(0, _DeclareSchemas)
