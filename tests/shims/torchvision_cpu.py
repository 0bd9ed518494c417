"""
Makes the torchvision wheel of PyPI, which is linked against CUDA, importable with a CPU build of torch.

Its compiled operators fail to load there. Torchvision tolerates this, but registers fake kernels for two of them.
Declaring these two schemas first suffices for image and video processors. `make` installs this file into the virtual
environment with a `.pth` file. It has no effect on a CUDA build.
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
